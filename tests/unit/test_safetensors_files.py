"""Safetensors directories: what the library writes is read, what is written the library reads, faults are named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.safetensors_files import INDEX, SafetensorsReader, SafetensorsWriter, Spec

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).view(3, 5),
    "b": torch.arange(7).bfloat16(),
    "c": torch.randn(4, 3, 2).half(),
    "d": torch.tensor(3.0, dtype=torch.float64),
}


def specs(tensors):
    return {name: Spec(tuple(t.shape), t.dtype) for name, t in tensors.items()}


@pytest.mark.parametrize("shard_bytes", [1, 80, 10**9])
def test_written_in_parts_and_out_of_order(tmp_path, shard_bytes):
    writer = SafetensorsWriter(tmp_path, specs(TENSORS), shard_bytes)
    parts = {
        "c": [((1, 0, 0), (4, 3, 2)), ((0, 0, 0), (1, 3, 2))],
        "d": [((), ())],
        "a": [((2, 0), (3, 5)), ((0, 0), (2, 5))],
        "b": [((5,), (7,)), ((0,), (5,))],
    }
    for name, boxes in parts.items():
        for box in (Box(*b) for b in boxes):
            writer.write(name, box, TENSORS[name][box.slices])
    writer.close()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {1: 4, 80: 2, 10**9: 1}[shard_bytes]
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in TENSORS.items())
    if shard_bytes == 80:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
    reader = SafetensorsReader(tmp_path)
    assert reader.specs == specs(TENSORS) and all(torch.equal(reader[n], t) for n, t in TENSORS.items())


def test_another_dtype_or_shape_is_not_written(tmp_path):
    writer = SafetensorsWriter(tmp_path, specs(TENSORS))
    for values in (TENSORS["a"].double(), TENSORS["a"][:2]):
        with pytest.raises(ValueError, match="a: torch"):
            writer.write("a", Box.whole((3, 5)), values)
    with pytest.raises(ValueError, match=r"a: torch.float32 \[3, 2\] for torch.float32 \[3, 5\]"):
        writer.write("a", Box.whole((3, 2)), TENSORS["a"][:, :2])


def sharded(directory):
    save_file({"a": TENSORS["a"]}, directory / "one.safetensors")
    save_file({"b": TENSORS["b"]}, directory / "two.safetensors")
    return {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


FAULTS = {
    "missing file": (lambda d, i: (d / "two.safetensors").unlink(), "two.safetensors: missing"),
    "cut off": (lambda d, i: cut(d / "two.safetensors"), "two.safetensors: cut off or damaged"),
    "not in the index": (lambda d, i: i["weight_map"].pop("a") and i["weight_map"].update(c="one.safetensors"),
                         "a: in one.safetensors, .* does not name it"),
    "not in its file": (lambda d, i: i["weight_map"].update(a="two.safetensors", c="one.safetensors"),
                        "a: .* says two.safetensors, found in one.safetensors"),
    "in two files": (lambda d, i: save_file(TENSORS, d / "two.safetensors"), "a is in two files, one.* and two.*"),
    "outside": (lambda d, i: i["weight_map"].update(a="../one.safetensors"), "not a file of the directory"),
}  # fmt: skip


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("fault", FAULTS)
def test_index_and_files_must_agree(tmp_path, fault):
    index = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert SafetensorsReader(tmp_path).specs.keys() == {"a", "b"}
    plant, message = FAULTS[fault]
    plant(tmp_path, index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        SafetensorsReader(tmp_path)


def test_twice_in_the_index(tmp_path):
    sharded(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "a": "x"}}')
    with pytest.raises(CheckpointError, match="a is listed twice"):
        SafetensorsReader(tmp_path)


def test_twice_without_an_index(tmp_path):
    save_file(TENSORS, tmp_path / "one.safetensors")
    save_file(TENSORS, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError) as error:
        SafetensorsReader(tmp_path)
    assert len(error.value.faults) == len(TENSORS)


def test_no_file_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        SafetensorsReader(tmp_path)
