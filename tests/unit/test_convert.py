"""``convert``: every bit comes back under every layout; faults are named, and leave no target."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_rlzero import cli, convert
from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_hf, to_megatron
from megatron_rlzero.launch import launch
from megatron_rlzero.resharding.directories import CheckpointError, staged
from tests.checkpoints import FAMILIES, config, read, same_bits, write, write_tensors

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def moe(tmp_path):
    return write(tmp_path / "moe", config("qwen3_moe"))


def there_and_back(source: Path, work: Path, sizes=(1, 1, 1, 1), naming="hybrid", shard_bytes=10**9) -> Path:
    to_megatron(source, work / "megatron", smallest_world(*sizes), naming)
    to_hf(work / "megatron", work / "back", shard_bytes=shard_bytes)
    return work / "back"


@pytest.mark.parametrize("naming", ["hybrid", "gpt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(tmp_path, family, naming):
    source = write(tmp_path / "source", config(family), mixed=True)
    sizes = (2, 3, 6, 1) if "moe" in family else (2, 3, 1, 1)
    back = there_and_back(source, tmp_path, sizes, naming)
    assert same_bits(read(source), read(back))
    assert not same_bits(read(write(tmp_path / "other", config(family), seed=1, mixed=True)), read(back))
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in back.iterdir()} == names
    assert all((back / n).read_bytes() == (source / n).read_bytes() for n in names if n != "model.safetensors")


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    tied=st.booleans(),
    mixed=st.booleans(),
    naming=st.sampled_from(["hybrid", "gpt"]),
    kv_heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 4),
    pipeline=st.integers(1, 3),
    tensor=st.sampled_from([1, 2, 4]),
    experts=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3])),
    vocabulary=st.integers(1, 300),
    shard_bytes=st.integers(200, 5000),
)
def test_random_layouts(
    tmp_path_factory, family, tied, mixed, naming, kv_heads, layers, pipeline, tensor, experts, vocabulary, shard_bytes
):
    changes = {"num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocabulary}
    hf = config(family, tie_word_embeddings=tied, **changes)
    expert, expert_tensor = experts if "moe" in family else (1, 1)
    work = tmp_path_factory.mktemp("random")
    source = write(work / "source", hf, mixed=mixed)
    refused = {
        f"{layers} layers cannot be cut into {pipeline}": layers < pipeline,
        f"k_proj.weight: {kv_heads} does not divide by a tensor-parallel size of {tensor}": kv_heads % tensor,
        f"expert_model_parallel_size = {expert} does not divide 6 experts": 6 % expert,
        f"8 does not divide by a tensor-parallel size of {expert_tensor}": 8 % expert_tensor,
    }
    expected = [line for line, wrong in refused.items() if wrong]
    sizes = (tensor, pipeline, expert, expert_tensor)
    if expected:
        with pytest.raises(CheckpointError) as error:
            there_and_back(source, work, sizes, naming, shard_bytes)
        # Which stage has what is not known where there are too many stages: sizes are not looked at then.
        assert all(line in str(error.value) for line in expected[: 1 if "cannot be cut" in expected[0] else None])
        assert sorted(p.name for p in work.iterdir()) == ["source"]
    else:
        assert same_bits(read(source), read(there_and_back(source, work, sizes, naming, shard_bytes)))
    shutil.rmtree(work)


def test_fused_experts_are_read(tmp_path, moe):
    tensors = read(moe)
    for layer in range(3):
        x = f"model.layers.{layer}.mlp.experts"
        gate, up, down = ([tensors.pop(f"{x}.{e}.{k}_proj.weight") for e in range(6)] for k in ("gate", "up", "down"))
        tensors[f"{x}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        tensors[f"{x}.down_proj"] = torch.stack(down)
    fused = write_tensors(tmp_path / "fused", config("qwen3_moe"), tensors)
    assert same_bits(read(moe), read(there_and_back(fused, tmp_path, (2, 1, 2, 1))))


def test_a_tied_head_is_read_if_it_is_the_embedding(tmp_path):
    hf = config("qwen3", tie_word_embeddings=True)
    source = write(tmp_path / "tied", hf)
    tensors = read(source)
    head = tensors["model.embed_tokens.weight"].clone()
    copied = write_tensors(tmp_path / "copied", hf, tensors | {"lm_head.weight": head})
    assert same_bits(tensors, read(there_and_back(copied, tmp_path)))
    head[0, 0] += 1
    other = write_tensors(tmp_path / "other", hf, tensors | {"lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        to_megatron(other, tmp_path / "target", smallest_world(1, 1, 1, 1))


def test_layers_of_one_tensor_have_one_dtype(tmp_path):
    tensors = read(write(tmp_path / "source", config("qwen3")))
    name = "model.layers.1.self_attn.o_proj.weight"
    source = write_tensors(tmp_path / "mixed", config("qwen3"), tensors | {name: tensors[name].bfloat16()})
    with pytest.raises(
        CheckpointError, match=r"linear_proj.weight: wrong dtype, .*layers.1.self_attn.o_proj.weight is torch.bfloat16"
    ):
        to_megatron(source, tmp_path / "target", smallest_world(1, 1, 1, 1), "gpt")
    assert same_bits(read(source), read(there_and_back(source, tmp_path)))


def changed(source: Path, change) -> Path:
    tensors = read(source)
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


HF_FAULTS = {
    "missing": (lambda t: t.pop(GATE), rf"{GATE}: missing, expected \[8, 12\]"),
    "extra": (lambda t: t.update(x=torch.ones(1)), "x: extra, config.json implies no such tensor"),
    "shape": (lambda t: t.update({GATE: t[GATE][:-1].clone()}), rf"{GATE}: found \[7, 12\], expected \[8, 12\]"),
    "integers": (lambda t: t.update({GATE: t[GATE].int()}), f"{GATE}: dtype I32, expected one of bfloat16, float16"),
    "fp8": (lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), f"{GATE}: dtype F8_E4M3, expected one of"),
    "halves": (lambda t: t.update({UP: t[UP].bfloat16()}), rf"wrong dtype, .*{UP} is torch.bfloat16"),
    "NaN": (lambda t: t[GATE][3].__setitem__(2, float("nan")), f"{GATE}: NaN or infinity"),
    "infinity": (lambda t: t[GATE][3].__setitem__(2, -float("inf")), f"{GATE}: NaN or infinity"),
}


@pytest.mark.parametrize("fault", HF_FAULTS)
def test_faults_of_a_hugging_face_directory(tmp_path, moe, capsys, fault):
    change, message = HF_FAULTS[fault]
    refused(capsys, [changed(moe, change), tmp_path / "target", "--to", "megatron"], message)


def test_all_faults_are_listed(tmp_path, moe, capsys):
    change = lambda t: (t.pop(GATE), t.pop(UP), t.update(x=torch.ones(1)))  # noqa: E731
    out = refused(capsys, [changed(moe, change), tmp_path / "target", "--to", "megatron"], f"{GATE}: missing")
    assert len(out.splitlines()) == 3 and UP in out and "x: extra" in out


def test_truncated_safetensors(tmp_path, moe, capsys):
    truncate(moe / "model.safetensors")
    refused(capsys, [moe, tmp_path / "target", "--to", "megatron"], "model.safetensors: cut off or damaged")


@pytest.mark.parametrize("block", [1, 100, 1000])
def test_tensors_of_several_blocks(tmp_path, moe, monkeypatch, block):
    monkeypatch.setattr("megatron_rlzero.resharding.streaming.BLOCK", block)
    monkeypatch.setattr("megatron_rlzero.resharding.directories.WRITE_BEHIND", block)
    assert same_bits(read(moe), read(there_and_back(moe, tmp_path, (2, 1, 2, 2))))


@pytest.fixture
def megatron(tmp_path, moe):
    to_megatron(moe, tmp_path / "megatron", smallest_world(2, 1, 2, 1))
    return tmp_path / "megatron"


MEGATRON_FAULTS = {
    "marker": (lambda d: (d / "metadata.json").unlink(), "no metadata.json, which is written last"),
    "backend": (lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "sharded_backend = 'zarr'"),
    "index": (lambda d: truncate(d / ".metadata"), ".metadata is damaged"),
    "truncated": (lambda d: truncate(d / "__1_0.distcp"), "__1_0.distcp: cut off, it has"),
    "file": (lambda d: (d / "__1_0.distcp").unlink(), "__1_0.distcp: missing"),
    "config": (lambda d: shutil.rmtree(d / "hf"), "hf has no config.json; name a Hugging Face directory .* --config"),
    "layers": (lambda d: edit_config(d, num_hidden_layers=4), r"linear_qkv.weight: missing, expected \[36, 12\]"),
    "fewer layers": (lambda d: edit_config(d, num_hidden_layers=2), "layers.4.*: unknown"),
    "shape": (
        lambda d: edit_config(d, hidden_size=16),
        r"q_layernorm|router.weight: found \[6, 12\], expected \[6, 16\]",
    ),
    "untied": (lambda d: edit_config(d, tie_word_embeddings=True), r"output_layer.weight\[0, 0\]: unknown"),
}


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("fault", MEGATRON_FAULTS)
def test_faults_of_a_megatron_checkpoint(tmp_path, megatron, capsys, fault):
    plant, message = MEGATRON_FAULTS[fault]
    plant(megatron)
    refused(capsys, [megatron, tmp_path / "target", "--to", "hf"], message)


def test_nan_in_a_megatron_checkpoint(tmp_path, moe, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_check_finite", lambda name, values: None)
        change = lambda t: t[GATE][3].__setitem__(2, float("nan"))  # noqa: E731
        to_megatron(changed(moe, change), tmp_path / "megatron", smallest_world(2, 1, 2, 1))
    refused(capsys, [tmp_path / "megatron", tmp_path / "target", "--to", "hf"], f"{GATE}: NaN or infinity")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_pattern_is_judged_as_torch_does(dtype):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for low in (0, 1, -1):
        wide = torch.stack([torch.full_like(halves, low)] * (dtype.itemsize // 2 - 1) + [halves], 1)  # little-endian
        values = wide.view(dtype).flatten()
        finite = torch.isfinite(values)
        convert._check_finite("x", values[finite])
        for wrong in values[~finite]:
            with pytest.raises(CheckpointError, match="x: NaN or infinity"):
                convert._check_finite("x", wrong.reshape(1))


def test_large_values_are_no_fault(tmp_path, moe):
    large = changed(moe, lambda t: t[GATE].fill_(torch.finfo(torch.float32).max))
    assert same_bits(read(large), read(there_and_back(large, tmp_path)))


def refused(capsys, arguments: list, message: str) -> str:
    """Exit code 2, the message, no target and nothing beside it."""
    target = Path(arguments[1])
    assert cli.main(["convert", *map(str, arguments)]) == 2
    out = capsys.readouterr().err
    assert re.search(message, out), out
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    return out


def test_sizes_that_do_not_divide_are_named(tmp_path, moe, capsys):
    sizes = ["--tensor-model-parallel-size", 8, "--expert-model-parallel-size", 4]
    out = refused(capsys, [moe, tmp_path / "target", "--to", "megatron", *sizes], "k_proj.weight: 4 does not divide")
    assert "expert_model_parallel_size = 4 does not divide 6 experts" in out
    refused(
        capsys,
        [moe, tmp_path / "target", "--to", "megatron", "--pipeline-model-parallel-size", 4],
        "3 layers cannot be cut",
    )
    refused(
        capsys, [moe, tmp_path / "target", "--to", "megatron", "--tensor-model-parallel-size", 0], "must be 1 or more"
    )


def test_config_may_come_from_elsewhere(tmp_path, moe, megatron):
    shutil.rmtree(megatron / "hf")
    to_hf(megatron, tmp_path / "back", moe)
    assert same_bits(read(moe), read(tmp_path / "back")) and (tmp_path / "back" / "tokenizer.json").is_file()


def test_a_target_with_files_is_left_alone(tmp_path, moe, capsys):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("text")
    assert cli.main(["convert", str(moe), str(target), "--to", "megatron"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    assert cli.main(["convert", str(moe), str(target), "--to", "megatron"]) == 0


KILLED = """
import os, signal, sys
from megatron_rlzero import cli, convert
from megatron_rlzero.resharding.{module} import {writer} as writer
write, count = writer.write, 0
def killed(*arguments):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
writer.write = killed
cli.main(["convert", *sys.argv[1:]])
"""


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_killed_conversion_is_never_taken_for_whole(tmp_path, moe, megatron, capsys, to):
    source, target = {"megatron": moe, "hf": megatron}[to], tmp_path / "target"
    module, writer = {
        "megatron": ("torch_dist_writer", "TorchDistWriter"),
        "hf": ("safetensors_files", "SafetensorsWriter"),
    }[to]
    script = KILLED.format(module=module, writer=writer)
    run = subprocess.run([sys.executable, "-c", script, source, target, "--to", to], check=False)
    assert run.returncode == -signal.SIGKILL
    partial = tmp_path / "target.partial"
    assert partial.is_dir() and not target.exists()
    refuse, back = ("hf", "megatron") if to == "megatron" else ("megatron", "hf")
    assert cli.main(["convert", str(partial), str(tmp_path / "x"), "--to", refuse]) == 2
    assert "half written" in capsys.readouterr().err
    shutil.copytree(partial, tmp_path / "renamed")  # under an innocent name the marker is missing
    assert cli.main(["convert", str(tmp_path / "renamed"), str(tmp_path / "x"), "--to", refuse]) == 2
    assert ("no metadata.json" if to == "megatron" else "no config.json") in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(target), "--to", back]) == 0
    assert target.is_dir() and not partial.exists()


def test_two_conversions_do_not_share_a_directory(tmp_path):
    with staged(tmp_path / "target") as partial, pytest.raises(CheckpointError, match="another process is writing"):
        (partial / "file").write_text("")
        with staged(tmp_path / "target"):
            pass
    assert (tmp_path / "target" / "file").is_file()


def test_a_disk_that_is_full_says_so(tmp_path, moe, monkeypatch, capsys):
    def full(file, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert cli.main(["convert", str(moe), str(tmp_path / "target"), "--to", "megatron"]) == 1
    assert re.search(r"the disk is full: __0_0.distcp needs [\d,]+ bytes, [\d,]+ are", capsys.readouterr().err)
    assert not (tmp_path / "target").exists() and not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize("to", ["megatron", pytest.param("hf", marks=pytest.mark.full)])
def test_several_processes_write_what_one_does(tmp_path, moe, megatron, to):
    """The files are the same, but for the order in which the index lists their contents."""
    source = {"megatron": moe, "hf": megatron}[to]
    arguments = ["-m", "megatron_rlzero", "convert", str(source), str(tmp_path / "target"), "--to", to]
    if to == "megatron":
        arguments += ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert launch(arguments, 3 if to == "hf" else 2) == 0
    if to == "hf":
        assert same_bits(read(tmp_path / "target"), read(moe))
        return
    for file in megatron.glob("*.distcp"):
        assert (tmp_path / "target" / file.name).read_bytes() == file.read_bytes()
    to_hf(tmp_path / "target", tmp_path / "back")
    assert same_bits(read(tmp_path / "back"), read(moe))


@pytest.mark.full
def test_a_fault_of_one_of_several_processes(tmp_path, moe, capfd):
    last = changed(moe, lambda t: t["model.layers.2.mlp.experts.5.down_proj.weight"].fill_(torch.nan))
    sizes = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    arguments = ["-m", "megatron_rlzero", "convert", str(last), str(tmp_path / "target"), "--to", "megatron", *sizes]
    assert launch(arguments, 2) == 2
    assert "experts.5.down_proj.weight: NaN or infinity" in capfd.readouterr().err
    assert not (tmp_path / "target").exists()
