"""The activation bytes of an estimate against what the learner's forward pass saves, per layer and token."""

import json

import pytest

from megatron_rlzero.architectures import read_config
from megatron_rlzero.estimate import layer_activation_bytes
from megatron_rlzero.launch import launch
from tests.tiny import make_qwen3, make_qwen3_moe

SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}


@pytest.mark.parametrize("make", [make_qwen3_moe, make_qwen3])
def test_activations_are_what_is_saved(make, tmp_path):
    for layers in (2, 3):
        make(tmp_path / str(layers), num_hidden_layers=layers, **SIZES | {"moe_intermediate_size": 128})
    out = tmp_path / "bytes.json"
    assert launch(["-m", "tests.distributed.activations", str(tmp_path), str(out)], 1) == 0
    hf = read_config(tmp_path / "2")
    for recompute, measured in json.loads(out.read_text()).items():
        expected = layer_activation_bytes(hf, 2, recompute)
        # Not counted: rotary tables, indices, reciprocal norms; and the experts' padded rows, uneven between layers.
        assert 0.8 * measured < expected < 1.02 * measured, recompute
    kept = json.loads(out.read_text())
    assert kept["full"] < kept["selective"] < kept["none"]
