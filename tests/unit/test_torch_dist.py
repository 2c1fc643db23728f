"""Distributed checkpoints: the pickled index is restricted, chunks are read where they lie, keys name parameters."""

import io
import os
import pickle
import subprocess

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from megatron_rlzero.architectures import architecture
from megatron_rlzero.architectures.checkpoint_names import find, naming_of, passed_over, place
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.torch_dist import TorchDistReader, read_index
from megatron_rlzero.resharding.torch_dist_writer import Part, TorchDistWriter, write_index
from tests.checkpoints import NAMED, config

VALUES = torch.randn(4, 6).bfloat16()
#: rank, box of the global tensor
CHUNKS = [(0, Box((0, 0), (2, 6))), (1, Box((2, 0), (4, 3))), (1, Box((2, 3), (4, 6)))]


@pytest.fixture
def checkpoint(tmp_path):
    parts = [Part(rank, "w", box, (4, 6), VALUES.dtype) for rank, box in CHUNKS]
    writer = TorchDistWriter(tmp_path, parts, {"linear._extra_state/shard_0_1": 1}, {"iteration": 3})
    for part in reversed(parts):
        writer.write(part, Box.whole(part.box.shape), VALUES[part.box.slices])
    write_index(tmp_path, parts, writer.close())
    return tmp_path


def test_chunks_come_back(checkpoint):
    reader = TorchDistReader(checkpoint)
    assert sorted(reader.objects) == ["common_state/shard_0_1", "linear._extra_state/shard_0_1"]
    assert [c.box for c in reader.chunks.values()] == [box for _, box in CHUNKS]
    for name, chunk in reader.chunks.items():
        assert torch.equal(reader[name], VALUES[chunk.box.slices]) and chunk.shape == (4, 6)


def test_torch_reads_it(checkpoint):
    state = {"w": torch.zeros(4, 6, dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    assert torch.equal(state["w"], VALUES)


def test_strides_are_kept(tmp_path):
    """Others save chunks with the strides that they had."""
    part = Part(0, "w", Box((0, 0), (6, 4)), (6, 4), VALUES.dtype)
    writer = TorchDistWriter(tmp_path, [part], {}, {})
    writer.write(part, Box.whole((6, 4)), VALUES.T)
    write_index(tmp_path, [part], writer.close())
    assert torch.equal(TorchDistReader(tmp_path)["w[0, 0]"], VALUES.T)
    [chunk] = TorchDistReader(tmp_path).chunks.values()
    saved = io.BytesIO()
    torch.save(VALUES.T, saved)
    assert saved.tell() == chunk.length
    with open(tmp_path / chunk.file, "r+b") as file:
        file.seek(chunk.offset)
        file.write(saved.getvalue())
    read = TorchDistReader(tmp_path)["w[0, 0]"]
    assert torch.equal(read, VALUES.T) and read.stride() == (1, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4)])
def test_chunks_are_written_as_torch_save_writes_them(tmp_path, shape, dtype):
    values = torch.randn(shape).to(dtype)
    part = Part(2, "w", Box.whole(shape), shape, dtype)
    writer = TorchDistWriter(tmp_path, [part], {}, {})
    rows = values.flatten(0, -2) if values.dim() > 1 else values
    for row in reversed(range(len(rows))):
        start, stop = (row, *(0 for _ in rows.shape[1:])), (row + 1, *rows.shape[1:])
        writer.write(part, Box(start, stop), rows[row : row + 1])
    [(_, _, name, offset, length)] = writer.close()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(values, expected := io.BytesIO())
    torch.serialization.set_crc32_options(before)
    assert (tmp_path / name).read_bytes()[offset : offset + length] == expected.getvalue()


def test_a_chunk_of_which_rows_are_missing_is_named(tmp_path):
    part = Part(0, "w", Box((0, 0), (4, 6)), (4, 6), VALUES.dtype)
    writer = TorchDistWriter(tmp_path, [part], {}, {})
    writer.write(part, Box((1, 0), (4, 6)), VALUES[1:])
    with pytest.raises(ValueError, match=r"w\[0, 0\] has not been written"):
        write_index(tmp_path, [part], writer.close())


def test_a_chunk_that_was_not_written_is_named(tmp_path):
    part = Part(0, "w", Box((0, 0), (4, 6)), (4, 6), VALUES.dtype)
    with pytest.raises(ValueError, match=r"w\[0, 0\] has not been written"):
        write_index(tmp_path, [part], TorchDistWriter(tmp_path, [part], {}, {}).close())


class Malicious:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "argument"), [(os.system, "touch {}"), (subprocess.getoutput, "touch {}"), (eval, "open('{}', 'w')")]
)
def test_a_malicious_index_is_refused_by_name(tmp_path, function, argument):
    harm = tmp_path / "harm"
    bomb = pickle.dumps(Malicious(function, argument.format(harm)))
    (tmp_path / ".metadata").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=rf"\.{function.__name__}, which no index needs: refused"):
        read_index(tmp_path / ".metadata")
    assert not harm.exists()
    pickle.loads(bomb)  # the same bytes do harm to those who trust them
    assert harm.exists()


@pytest.mark.parametrize("name", ["load", "hub.load", "serialization.load", "classes"])
def test_nothing_of_torch_but_its_dtypes(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(f"ctorch\n{name}\n.".encode())
    with pytest.raises(CheckpointError, match="refused"):
        read_index(tmp_path / ".metadata")


@pytest.mark.parametrize(("family", "naming"), NAMED)
def test_every_parameter_is_found_where_it_is_put(family, naming):
    hf = config(family)
    rules = architecture(hf).parameters(hf, 1)
    places = {name: place(name, naming, 3, 6) for name in rules}
    assert len({(p.key, p.index) for p in places.values()}) == len(rules)
    assert naming_of({p.key for p in places.values()}) == naming
    for name, at in places.items():
        for part, key in enumerate(at.keys):
            wanted = (name, len(at.axes), part if at.blocks else None)
            assert find(key, (*at.index, 0, 0), naming, rules) == wanted


MOE = "decoder.layers.3.mlp.experts.linear_fc1.weight5"
SPELLINGS = {
    ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 5, 8, 0), "gpt"): (MOE, 2, None),
    ("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (5, 8, 0), "gpt"): (MOE, 1, None),
    ("decoder.layers.1.mlp.experts.experts.5.linear_fc1.weight_w", (4, 0), "gpt"): (MOE, 0, 0),
    ("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v", (4, 0), "hybrid"): (MOE, 0, 1),
    ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (5, 8, 0), "hybrid"): (MOE, 1, None),
    ("decoder.layers.mlp.linear_fc1.layer_norm_weight", (1, 0), "gpt"):
        ("decoder.layers.3.pre_mlp_layernorm.weight", 1, None),
    ("decoder.layers.1.input_layernorm.weight", (0,), "gpt"):
        ("decoder.layers.2.self_attention.linear_qkv.layer_norm_weight", 0, None),
    ("decoder.layers.2.input_layernorm.weight", (0,), "hybrid"):
        ("decoder.layers.2.self_attention.linear_qkv.layer_norm_weight", 0, None),
    ("decoder.final_layernorm.weight", (0,), "gpt"): ("decoder.final_norm.weight", 0, None),
}  # fmt: skip
#: of the hybrid M*-EME
HYBRID_SPELLINGS = {
    ("decoder.layers.0.norm.weight", (0,), "hybrid"): ("decoder.layers.0.mixer.in_proj.layer_norm_weight", 0, None),
    ("decoder.layers.0.mixer.in_proj.weight.z", (0, 0), "hybrid"): ("decoder.layers.0.mixer.in_proj.weight", 0, 0),
    ("decoder.layers.4.mixer.in_proj.weight.dt", (4, 0), "hybrid"): ("decoder.layers.4.mixer.in_proj.weight", 0, 4),
    ("decoder.layers.4.mixer.conv1d.weight.C", (0, 0, 0), "hybrid"): ("decoder.layers.4.mixer.conv1d_weight", 0, 2),
    ("decoder.layers.0.mixer.conv1d.bias.x", (0,), "hybrid"): ("decoder.layers.0.mixer.conv1d_bias", 0, 0),
    ("decoder.layers.1.input_layernorm.weight", (0,), "hybrid"):
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", 0, None),
    ("decoder.layers.2.pre_mlp_layernorm.weight", (0,), "hybrid"):
        ("decoder.layers.2.mlp.linear_fc1.layer_norm_weight", 0, None),
    ("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight", (0, 0), "hybrid"):
        ("decoder.layers.3.mlp.experts.linear_fc1.weight5", 0, None),
    ("decoder.layers.3.mlp.router.expert_bias", (0,), "hybrid"): ("decoder.layers.3.mlp.router.expert_bias", 0, None),
}  # fmt: skip


@pytest.mark.parametrize("spelling", [*SPELLINGS, *HYBRID_SPELLINGS])
def test_other_spellings_of_megatron(spelling):
    hf = config("qwen3_moe" if spelling in SPELLINGS else "nemotron_h")
    found = find(*spelling, architecture(hf).parameters(hf, 1))
    assert tuple(found) == (SPELLINGS | HYBRID_SPELLINGS)[spelling]


@pytest.mark.parametrize(
    ("key", "start", "naming"),
    [
        ("decoder.layers.mlp.router.weight", (3, 0, 0), "gpt"),  # three layers: 0 to 2
        ("decoder.layers.mlp.router.weight", (0, 0, 0), "hybrid"),
        ("decoder.layers.2.mlp.router.weight", (0, 0), "hybrid"),
        ("decoder.layers.1.mlp.experts.experts.6.linear_fc2.weight", (0, 0), "gpt"),
        ("mtp.layers.0.mlp.router.weight", (0, 0), "gpt"),
        ("decoder.final_norm.weight", (0,), "gpt"),
    ],
)
def test_unknown_keys(key, start, naming):
    hf = config("qwen3_moe")
    assert find(key, start, naming, architecture(hf).parameters(hf, 1)) is None and not passed_over(key)


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.0.mixer.in_proj.weight",  # all blocks as one, which tensor parallelism would mix up
        "decoder.layers.0.mixer.in_proj.weight.q",
        "decoder.layers.0.mixer.conv1d_weight.x",
        "decoder.layers.1.mixer.in_proj.weight.z",  # attention
        "decoder.layers.1.norm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mixer.norm.bias",
    ],
)
def test_unknown_keys_of_a_hybrid(key):
    hf = config("nemotron_h")
    assert find(key, (0, 0), "hybrid", architecture(hf).parameters(hf, 1)) is None and not passed_over(key)


def test_training_state_is_passed_over():
    keys = "optimizer.state.exp_avg.output_layer.weight", "chained_0.optimizer.state.step", "rng_state/shard_0_1"
    assert all(map(passed_over, (*keys, "decoder.layers.mlp.linear_fc1._extra_state/shard_0_3")))
