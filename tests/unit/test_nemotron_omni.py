"""A model with more than a language model: the rest is carried along under every conversion, bit by bit."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlzero import cli
from megatron_rlzero.architectures import architecture, language_settings, read_config, wrong_counts
from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_hf, to_megatron
from megatron_rlzero.launch import launch
from megatron_rlzero.resharding import safetensors_files
from megatron_rlzero.resharding.torch_dist import TorchDistReader
from tests.checkpoints import changed, config, read, refused, same_bits
from tests.omni import BESIDE, OMNI, make_omni
from tests.tiny import make_nemotron_h

SIZES = (2, 2, 2, 1)
UP = "language_model.backbone.layers.1.mixer.experts.2.up_proj.weight"


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return make_nemotron_h(tmp_path_factory.mktemp("language") / "model")


@pytest.fixture
def omni(tmp_path, language):
    return make_omni(tmp_path / "omni", language)


def formats(directory) -> dict[str, str]:
    """Tensor -> format as the files' headers name it."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(*struct.unpack("<Q", stream.read(8))))
        found |= {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return found


@pytest.mark.parametrize("shard_bytes", [20_000, 10**9])
@pytest.mark.parametrize("key", ["llm_config", "text_config"])
def test_every_tensor_comes_back(tmp_path, language, key, shard_bytes):
    source = make_omni(tmp_path / "omni", language, key)
    told = []
    size = to_megatron(source, tmp_path / "there", smallest_world(*SIZES), progress=lambda *done: told.append(done))
    assert {total for total, _ in told} == {size} and sum(done for _, done in told) == size
    back = to_hf(tmp_path / "there", tmp_path / "back", shard_bytes=shard_bytes)
    tensors = read(source)
    assert same_bits(read(tmp_path / "back"), tensors) and back == sum(t.nbytes for t in tensors.values())
    assert formats(tmp_path / "back") == formats(source) and BESIDE.keys() <= tensors.keys()
    for name in ("config.json", "modeling.py"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert not any("vision" in key or "mlp1" in key for key in TorchDistReader(tmp_path / "there").chunks)
    other = read(source) | {"mlp1.0.weight": torch.zeros(4).bfloat16()}
    assert not same_bits(read(tmp_path / "back"), other)


def test_the_language_model_is_that_of_the_plain_directory(tmp_path, language, omni):
    """The distributed checkpoints are the same but for the model's dtype."""
    to_megatron(omni, tmp_path / "omni_there", smallest_world(*SIZES))
    to_megatron(language, tmp_path / "plain_there", smallest_world(*SIZES))
    one, other = (TorchDistReader(tmp_path / f"{x}_there") for x in ("omni", "plain"))
    assert one.chunks.keys() == other.chunks.keys()
    assert all(torch.equal(one[n], other[n].to(one[n].dtype)) for n in one.chunks)


@pytest.mark.full
def test_several_processes_write_what_one_does(tmp_path, omni):
    arguments = ["-m", "megatron_rlzero", "convert"]
    sizes = ["--tensor-model-parallel-size", "2"]
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert launch([*arguments, str(omni), there, "--to", "megatron", *sizes], 2) == 0
    assert launch([*arguments, there, back, "--to", "hf"], 2) == 0
    assert same_bits(read(tmp_path / "back"), read(omni))


def edit(source, name, change):
    """Changes the file, of three, that holds a tensor."""
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})


def test_missing_and_extra_tensors_of_the_language_model_are_faults(tmp_path, omni, capsys):
    edit(omni, UP, lambda t: t.update({"language_model.x": t.pop(UP)}))
    index = omni / safetensors_files.INDEX
    index.write_text(index.read_text().replace(UP, "language_model.x"))
    out = refused(capsys, [omni, tmp_path / "target", "--to", "megatron"], rf"{UP}: missing, expected \[48, 32\]")
    assert "language_model.x: extra" in out and len(out.splitlines()) == 2


def test_nan_in_the_language_model_is_a_fault(tmp_path, omni, capsys):
    edit(omni, UP, lambda t: t[UP][3].__setitem__(2, float("nan")))
    refused(capsys, [omni, tmp_path / "target", "--to", "megatron"], f"{UP}: NaN or infinity")


@pytest.mark.parametrize("fault", ["missing", "cut off", "shard"])
def test_carried_tensors_that_are_lost_are_faults(tmp_path, omni, capsys, monkeypatch, fault):
    if fault == "shard":
        monkeypatch.setattr(safetensors_files.SafetensorsWriter.__init__, "__defaults__", (50, True))
    to_megatron(omni, tmp_path / "there", smallest_world(*SIZES))
    file = sorted((tmp_path / "there" / "hf").glob("*.safetensors"))[-1]
    if fault == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    wanted = {"missing": "hf has no safetensors file", "cut off": "cut off or damaged", "shard": "missing, .* names it"}
    message = f"{wanted[fault]}.*; all tensors that are not of language_model come from there"
    refused(capsys, [tmp_path / "there", tmp_path / "target", "--to", "hf"], message)
    to_hf(tmp_path / "there", tmp_path / "back", omni)
    assert same_bits(read(tmp_path / "back"), read(omni))


def test_a_disk_that_is_full_says_so(tmp_path, omni, monkeypatch, capsys):
    def full(path, size):
        if path.name.endswith(".safetensors"):
            raise OSError(28, f"the disk is full: {path.name} needs {size:,} bytes")
        return allocate(path, size)

    allocate = safetensors_files.allocate
    monkeypatch.setattr(safetensors_files, "allocate", full)
    assert cli.main(["convert", str(omni), str(tmp_path / "target"), "--to", "megatron"]) == 1
    assert re.search(r"the disk is full: model.safetensors needs", capsys.readouterr().err)
    assert not (tmp_path / "target").exists() and not (tmp_path / "target.partial").exists()


def test_nothing_to_carry_is_no_fault(tmp_path, language):
    source = make_omni(tmp_path / "omni", language)
    tensors = {name: tensor for name, tensor in read(source).items() if name not in BESIDE}
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "there", smallest_world(*SIZES))
    to_hf(tmp_path / "there", tmp_path / "back")
    assert same_bits(read(tmp_path / "back"), tensors)


def test_settings_are_those_of_the_language_model(language, omni):
    hf = read_config(omni)
    assert hf == read_config(language) | {"model_type": OMNI}
    assert architecture(hf).unsupported(hf) == wrong_counts(hf) == []
    without = {"model_type": OMNI, "vision_config": {}}
    assert language_settings(without) is without
    assert "vocab_size = None: not a positive integer" in wrong_counts(without)
    nested = config("qwen3") | {"text_config": {"vocab_size": 7}}
    assert language_settings(nested) is nested


def test_another_family_carries_nothing(tmp_path, language, capsys):
    source = tmp_path / "plain"
    source.mkdir()
    save_file(read(language), source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((language / "config.json").read_bytes())
    extra = changed(source, lambda t: t.update({"vision_model.x": torch.ones(1)}))
    refused(capsys, [extra, tmp_path / "target", "--to", "megatron"], "vision_model.x: extra")
