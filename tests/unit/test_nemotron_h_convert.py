"""Conversion of Nemotron-H: blocks, dtypes and names of its layers; what is wrong or does not divide is named."""

import json

import pytest
import torch

from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_hf, to_megatron
from megatron_rlzero.resharding.torch_dist import TorchDistReader
from tests.checkpoints import changed, config, read, refused, same_bits, write, write_tensors

SIZES = (2, 3, 2, 1)
MIXER, MOE = "backbone.layers.4.mixer", "backbone.layers.3.mixer"
#: key, stored by a Mamba layer of 8 heads of 3, 4 groups, state 5, hidden 12 -> shape
STORED = {
    "in_proj.weight.z": (24, 12),
    "in_proj.weight.x": (24, 12),
    "in_proj.weight.B": (20, 12),
    "in_proj.weight.C": (20, 12),
    "in_proj.weight.dt": (8, 12),
    "in_proj.layer_norm_weight": (12,),
    "conv1d.weight.x": (24, 1, 4),
    "conv1d.weight.B": (20, 1, 4),
    "conv1d.weight.C": (20, 1, 4),
    "conv1d.bias.x": (24,),
    "conv1d.bias.B": (20,),
    "conv1d.bias.C": (20,),
    "A_log": (8,),
    "D": (8,),
    "dt_bias": (8,),
    "norm.weight": (24,),
    "out_proj.weight": (12, 24),
}


@pytest.fixture
def hybrid(tmp_path):
    return write(tmp_path / "hybrid", config("nemotron_h"), mixed=True)


@pytest.fixture
def converted(tmp_path, hybrid):
    to_megatron(hybrid, tmp_path / "megatron", smallest_world(*SIZES))
    return tmp_path / "megatron"


def test_each_block_is_a_tensor_of_its_own_split_over_the_ranks(hybrid, converted):
    reader, tensors = TorchDistReader(converted), read(hybrid)
    layer = "decoder.layers.4.mixer."
    shapes = {c.key.removeprefix(layer): c.shape for c in reader.chunks.values() if c.key.startswith(layer)}
    assert shapes == STORED
    whole, at = tensors[f"{MIXER}.in_proj.weight"], 0
    for block, rows in zip(("z", "x", "B", "C", "dt"), (24, 24, 20, 20, 8), strict=True):
        for rank in range(2):
            mine = whole[at + rank * rows // 2 : at + (rank + 1) * rows // 2]
            assert torch.equal(reader[f"{layer}in_proj.weight.{block}[{rank * rows // 2}, 0]"], mine)
        at += rows
    chunks = {c.key: c.dtype for c in reader.chunks.values()}
    for name in ("A_log", "D", "dt_bias"):
        assert chunks[layer + name] == torch.float32
    assert chunks["decoder.layers.3.mlp.router.expert_bias"] == torch.float32
    assert chunks[f"{layer}in_proj.weight.dt"] == torch.bfloat16


def test_fp32_tensors_of_a_bf16_checkpoint_stay_so(tmp_path, hybrid, converted):
    to_hf(converted, tmp_path / "back")
    back = read(tmp_path / "back")
    assert same_bits(back, read(hybrid))
    wide = {name for name, tensor in back.items() if tensor.dtype == torch.float32}
    assert {f"{MIXER}.{x}" for x in ("A_log", "D", "dt_bias")} | {f"{MOE}.gate.e_score_correction_bias"} <= wide
    assert back[f"{MIXER}.out_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_names_that_transformers_has_in_memory_are_read(tmp_path, hybrid, prefix, fused):
    tensors = read(hybrid)
    wanted = dict(tensors)
    for layer in (3, 5) if fused else ():
        x = f"backbone.layers.{layer}.mixer.experts"
        for kind in ("up", "down"):
            tensors[f"{x}.{kind}_proj"] = torch.stack([tensors.pop(f"{x}.{e}.{kind}_proj.weight") for e in range(6)])
    tensors = {prefix + n.removeprefix("backbone.") if "backbone." in n else n: t for n, t in tensors.items()}
    assert same_bits(tensors, wanted) == (prefix == "backbone." and not fused)
    source = write_tensors(tmp_path / "source", config("nemotron_h"), tensors)
    to_megatron(source, tmp_path / "there", smallest_world(*SIZES))
    to_hf(tmp_path / "there", tmp_path / "back")
    assert same_bits(read(tmp_path / "back"), wanted)


HF_FAULTS = {
    "missing": (lambda t: t.pop(f"{MIXER}.A_log"), rf"{MIXER}.A_log: missing, expected \[8\]"),
    "gated": (
        lambda t: t.update({f"{MOE}.experts.0.gate_proj.weight": torch.ones(8, 7)}),
        f"{MOE}.experts.0.gate_proj.weight: extra",
    ),
    "two prefixes": (
        lambda t: t.update({"model.norm_f.weight": t.pop("backbone.norm_f.weight")}),
        r"backbone.norm_f.weight: missing, expected \[12\]",
    ),
    "blocks": (
        lambda t: t.update({f"{MIXER}.in_proj.weight": t[f"{MIXER}.in_proj.weight"][:-1].clone()}),
        rf"{MIXER}.in_proj.weight: found \[95, 12\], expected \[96, 12\]",
    ),
    "infinity": (lambda t: t[f"{MIXER}.A_log"][3:4].fill_(-torch.inf), f"{MIXER}.A_log: NaN or infinity"),
    "integers": (lambda t: t.update({f"{MIXER}.D": t[f"{MIXER}.D"].long()}), f"{MIXER}.D: dtype I64"),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_faults_of_a_hugging_face_directory(tmp_path, hybrid, capsys, fault):
    change, message = HF_FAULTS[fault]
    refused(capsys, [changed(hybrid, change), tmp_path / "target", "--to", "megatron"], message)


MEGATRON_FAULTS = {
    "layers": ({"hybrid_override_pattern": "M*-EMEM"}, r"layers.6.mixer.conv1d.bias.B: missing, expected \[20\]"),
    "kinds": ({"hybrid_override_pattern": "MM-EME"}, r"layers.1.self_attention.linear_proj.weight\[0, 0\]: unknown"),
    "state": ({"ssm_state_size": 6}, r"in_proj.weight.C: found \[20, 12\], expected \[24, 12\]"),
    "heads": ({"mamba_num_heads": 4}, r"mixer.D: found \[8\], expected \[4\]"),
    "latent": ({"moe_latent_size": None}, "fc1_latent_proj.weight.*: unknown"),
}


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_faults_of_a_megatron_checkpoint(tmp_path, converted, capsys, fault):
    changes, message = MEGATRON_FAULTS[fault]
    path = converted / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(capsys, [converted, tmp_path / "target", "--to", "hf"], message)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"n_groups": 2}, 4, "in_proj.weight: n_groups = 2 does not divide by a tensor-parallel size of 4"),
        ({"mamba_num_heads": 6, "n_groups": 6}, 4, "in_proj.weight: mamba_num_heads = 6 does not divide"),
    ],
)
def test_sizes_that_do_not_divide_are_named(tmp_path, capsys, changes, size, message):
    """Also where the blocks' rows would divide: a rank has whole groups of heads."""
    hf = config("nemotron_h", hybrid_override_pattern="M-", ssm_state_size=4, mamba_head_dim=4, **changes)
    source = write(tmp_path / "source", hf)
    out = refused(
        capsys, [source, tmp_path / "target", "--to", "megatron", "--tensor-model-parallel-size", size], message
    )
    assert out.startswith(f"tensor_model_parallel_size = {size}: ") and "choose a divisor" in out


def test_names_of_a_gpt_model_are_refused(tmp_path, hybrid, capsys):
    message = r"naming = gpt: .* of this nemotron_h are M\*-EME; use hybrid"
    refused(capsys, [hybrid, tmp_path / "target", "--to", "megatron", "--naming", "gpt"], message)
    other = write(tmp_path / "other", config("qwen3"))
    to_megatron(other, tmp_path / "gpt", smallest_world(1, 1, 1, 1), "gpt")
    refused(capsys, [tmp_path / "gpt", tmp_path / "target", "--to", "hf", "--config", hybrid], "naming = gpt: ")
