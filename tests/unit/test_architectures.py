"""Qwen3-MoE's parameter table: all ranks together hold every element of the checkpoint once per replica."""

import json
import sys

import numpy as np
import pytest

from megatron_rlzero.architectures import (
    KNOWN,
    add,
    architecture,
    families,
    llama,
    qwen2,
    qwen3,
    qwen3_moe,
    read_config,
    rules,
)
from megatron_rlzero.resharding.layout import Box

HF = {
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.1."
SLICES = 4


def is_expert(name):
    return ".experts." in name


def is_replicated(name):
    return "norm" in name or "router" in name


def parameters_of(family, hf, tp, ep=1):
    """(parameter, pieces) of every rank; experts are dealt out over the expert-parallel ranks and never cut."""
    per_rank = hf.get("num_experts", 0) // ep
    for name, rule in family.parameters(hf, SLICES).items():
        if is_expert(name):
            owner = int(name.rsplit("weight", 1)[1]) // per_rank
            for _ in (rank for rank in range(ep) if rank == owner):
                yield name, list(rule.pieces(name, 0, 1))
        else:
            for rank in range(tp):
                yield name, list(rule.pieces(name, rank, tp))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_every_element_is_held_once_per_replica(tp, ep):
    assert_held_once(qwen3_moe, HF, tp, ep)


def assert_held_once(family, hf, tp, ep=1):
    shapes = family.tensors(hf)
    held = {name: np.zeros(shape, dtype=int) for name, shape in shapes.items()}
    copies = {}
    for name, pieces in parameters_of(family, hf, tp, ep):
        for piece in pieces:
            assert piece.box.shape == piece.local_box.shape
            held[piece.tensor][piece.box.slices] += 1
            copies[piece.tensor] = tp if is_replicated(name) else 1
            if hf["tie_word_embeddings"] and "embed" in piece.tensor:
                copies[piece.tensor] = 2  # the embedding and the output layer
        if pieces:  # a shard may be vocabulary padding alone
            written = np.zeros(np.max([piece.local_box.stop for piece in pieces], axis=0), dtype=int)
            for piece in pieces:
                written[piece.local_box.slices] += 1
            assert (written == 1).all()  # pieces of a parameter neither overlap nor leave a gap
    for name, elements in held.items():
        assert (elements == copies[name]).all(), name


def test_tensors_have_the_shapes_of_the_checkpoint():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {k: v for k, v in HF.items() if k != "model_type"}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=16, **settings))
    shapes = qwen3_moe.tensors(HF)
    # transformers 5 fuses the experts of a layer in memory; the checkpoint has them one by one.
    for name, parameter in model.named_parameters():
        if not is_expert(name):
            assert shapes.pop(name) == tuple(parameter.shape)
    assert len(shapes) == 2 * 8 * 3
    for layer in range(2):
        for e in range(8):
            prefix = f"model.layers.{layer}.mlp.experts.{e}"
            assert shapes[f"{prefix}.gate_proj.weight"] == shapes[f"{prefix}.up_proj.weight"] == (16, 24)
            assert shapes[f"{prefix}.down_proj.weight"] == (24, 16)


def shard(name, rank, size, tensors):
    """The local tensor that the pieces of a rank make."""
    pieces = list(qwen3_moe.parameters(HF, SLICES)[name].pieces(name, rank, size))
    local = np.full(np.max([p.local_box.stop for p in pieces], axis=0), -1)
    for p in pieces:
        local[p.local_box.slices] = tensors[p.tensor][p.box.slices]
    return local


def numbered():
    """Every element of the checkpoint has its own number."""
    start, tensors = 0, {}
    for name, shape in qwen3_moe.tensors(HF).items():
        tensors[name] = np.arange(start, start := start + int(np.prod(shape))).reshape(shape)
    return tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_qkv_is_interleaved_by_group(tp):
    tensors, dim = numbered(), HF["head_dim"]
    q, k, v = (tensors[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv")
    blocks = []
    for group in range(4):
        blocks += [q[2 * group * dim : (2 * group + 2) * dim]]  # two query heads per group
        blocks += [x[group * dim : (group + 1) * dim] for x in (k, v)]
    wanted = np.split(np.concatenate(blocks), tp)
    for rank in range(tp):
        found = shard("decoder.layers.2.self_attention.linear_qkv.weight", rank, tp, tensors)
        assert np.array_equal(found, wanted[rank])
    assert not np.array_equal(np.concatenate((q, k, v)), np.concatenate(blocks))


def test_layers_and_experts_are_those_of_megatron():
    """Hugging Face layer 1 is attention at Megatron's layer 2 and experts at layer 3."""
    table = qwen3_moe.parameters(HF, SLICES)
    (piece,) = table["decoder.layers.3.mlp.experts.linear_fc2.weight5"].pieces("x", 0, 1)
    assert piece.tensor == f"{LAYER}mlp.experts.5.down_proj.weight"
    (piece,) = table["decoder.layers.2.self_attention.linear_proj.weight"].pieces("x", 1, 2)
    assert (piece.tensor, piece.box) == (f"{LAYER}self_attn.o_proj.weight", Box((0, 12), (24, 24)))
    assert not any(name.startswith("decoder.layers.2.mlp") or "layers.4." in name for name in table)
    (piece,) = table["decoder.layers.3.mlp.router.weight"].pieces("x", 1, 2)
    assert piece.box == Box.whole((8, 24))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_lie_under_each_other_on_every_rank(tp):
    gate, up = np.arange(16 * 3).reshape(16, 3), np.arange(16 * 3).reshape(16, 3) + 1000
    rule = rules.Stacked(("gate", "up"), (16, 3))
    for rank in range(tp):
        local = np.full((2 * 16 // tp, 3), -1)
        for p in rule.pieces("fc1", rank, tp):
            local[p.local_box.slices] = {"gate": gate, "up": up}[p.tensor][p.box.slices]
        wanted = np.concatenate((np.split(gate, tp)[rank], np.split(up, tp)[rank]))
        assert np.array_equal(local, wanted)
    if tp > 1:  # a shard of the whole [gate; up] is something else
        assert not np.array_equal(local, np.split(np.concatenate((gate, up)), tp)[-1])


@pytest.mark.parametrize(
    ("vocabulary", "slices", "padded"),
    [(300, 1, 384), (300, 2, 512), (300, 4, 512), (384, 1, 384), (1, 4, 512), (151_936, 4, 152_064)],
)
def test_vocabulary_padding_comes_from_no_tensor(vocabulary, slices, padded):
    assert rules.padded_vocab_size(vocabulary, slices) == padded
    for tp in (n for n in (1, 2, 4) if n <= slices):
        step, held = padded // tp, []
        for rank in range(tp):
            for p in rules.Vocabulary("w", (vocabulary, 5), slices).pieces("x", rank, tp):
                assert p.local_box.stop[0] <= step
                # Row i of the padded vocabulary is row i - rank * step of the shard.
                assert p.box.start[0] - p.local_box.start[0] == rank * step
                held += range(p.box.start[0], p.box.stop[0])
        assert held == list(range(vocabulary))


def test_a_shard_of_padding_alone_has_no_piece():
    rule = rules.Vocabulary("w", (130, 5), 4)
    assert [len(list(rule.pieces("x", rank, 4))) for rank in range(4)] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"^w: 512 does not divide by a tensor-parallel size of 3"):
        list(rule.pieces("x", 0, 3))


def test_more_ranks_than_key_value_heads_name_the_tensor():
    rule = qwen3_moe.parameters(HF, SLICES)["decoder.layers.2.self_attention.linear_qkv.weight"]
    with pytest.raises(ValueError, match=rf"^{LAYER}self_attn\.k_proj\.weight: 4 does not divide by .* size of 8"):
        list(rule.pieces("x", 0, 8))
    with pytest.raises(ValueError, match=r"^a: 10 does not divide by a tensor-parallel size of 4"):
        list(rules.Split("a", (10,), 0).pieces("x", 0, 4))
    with pytest.raises(ValueError, match=r"^g: 10 does not divide"):
        list(rules.Stacked(("g", "u"), (10, 2)).pieces("x", 0, 4))


def test_tied_embeddings_have_one_tensor():
    tied = HF | {"tie_word_embeddings": True}
    table = qwen3_moe.parameters(tied, SLICES)
    assert table["output_layer.weight"] == table["embedding.word_embeddings.weight"]
    assert "lm_head.weight" in qwen3_moe.tensors(HF)
    assert "lm_head.weight" not in qwen3_moe.tensors(tied)


def test_unknown_family_lists_the_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF))
    assert architecture(read_config(tmp_path)) is qwen3_moe
    for hf in ({"model_type": "gpt2"}, {}):
        with pytest.raises(ValueError) as error:
            architecture(hf)
        known = f"model_type = {hf.get('model_type')!r} is not known; known are {', '.join(KNOWN)}"
        assert str(error.value).startswith(known)  # families of other files may follow
    dense = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3_moe": qwen3_moe}
    assert dense.keys() <= set(KNOWN) and "nemotron_h" in KNOWN
    assert {name: architecture({"model_type": name}) for name in dense} == dense
    assert all(family in families() for family in dense.values())


def test_a_family_in_a_file_of_its_own(tmp_path, monkeypatch):
    """Everything that a family has to define is asked for by name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "mine.py"
    with pytest.raises(ValueError, match=r"mine\.py: no such file"):
        add(file)
    lines = [f"{name} = None" for name in ("unsupported", "parameters", "engine_parameters", "tensors", "trace_points")]
    file.write_text('MODEL_TYPE = "mine"\n' + "\n".join(lines))
    with pytest.raises(
        ValueError, match="BUFFERS, FP32, engine_models, layer_pattern, mixer, rotary, transformer_config"
    ):
        add(file)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match=r"broken\.py cannot be imported: No module named"):
        add(tmp_path / "broken.py")
    (tmp_path / "json.py").touch()
    with pytest.raises(ValueError, match=r"json is also the name of .*; rename the file"):
        add(tmp_path / "json.py")
    other = tmp_path / "other.py"
    other.write_text("from megatron_rlzero.architectures.llama import *\nMODEL_TYPE = 'other'\n")
    assert add(other) == "other" == add(other)
    assert architecture({"model_type": "other"}).layer_pattern({"num_hidden_layers": 1}, 1) == "*-"
    with pytest.raises(ValueError, match=r"known are .*llama.*, other"):
        architecture({"model_type": "mine"})


UNSUPPORTED = {
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "attention_bias": True,
    "use_sliding_window": True,
    "hidden_act": "gelu",
    "rope_scaling": {"rope_type": "yarn"},
    "layer_types": ["full_attention", "sliding_attention"],
    "quantization_config": {"bits": 4},
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": None,
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_each_unsupported_setting_is_named(key):
    (fault,) = qwen3_moe.unsupported(HF | {key: UNSUPPORTED[key]})
    assert fault.startswith(f"{'rope_type' if key == 'rope_scaling' else key} = ")
    assert fault.endswith("is supported")


def test_unsupported_settings_are_all_named_and_supported_ones_are_not():
    assert len(qwen3_moe.unsupported(HF | UNSUPPORTED)) == len(UNSUPPORTED)
    supported = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    assert qwen3_moe.unsupported(HF) == qwen3_moe.unsupported(HF | supported) == []
    assert qwen3_moe.unsupported(HF | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}})


def test_translation():
    config = qwen3_moe.transformer_config(HF)
    assert config["num_layers"] == 4
    assert config["num_moe_experts"] == 8
    assert config["moe_router_pre_softmax"] is False
    assert qwen3_moe.transformer_config(HF | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True
    other = {k: v for k, v in HF.items() if k != "num_experts"} | {"num_local_experts": 6}
    assert qwen3_moe.transformer_config(other)["num_moe_experts"] == 6
    assert qwen3_moe.layer_pattern(HF, 1) == "*E*E"
    assert qwen3_moe.layer_pattern(HF, 2) == "*E|*E"
