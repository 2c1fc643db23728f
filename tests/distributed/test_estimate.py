"""The activation bytes of an estimate against what the learner's forward pass saves, per layer and token."""

import json

import pytest

from megatron_rlzero.architectures import read_config
from megatron_rlzero.estimate import activation_bytes
from megatron_rlzero.launch import launch
from tests.tiny import make_nemotron_h, make_qwen3, make_qwen3_moe

SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
EXPERTS = {"moe_intermediate_size": 128}
MAMBA = {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 32}
#: what makes a model; Megatron's layers in which one of three layers differs from one of two
MODELS = {
    "qwen3_moe": (lambda path, n: make_qwen3_moe(path, num_hidden_layers=n, **SIZES | EXPERTS), "*E"),
    "qwen3": (lambda path, n: make_qwen3(path, num_hidden_layers=n, **SIZES), "*-"),
    "mamba": (lambda path, n: make_nemotron_h(path, pattern="M" * n, **SIZES | MAMBA), "M"),
    "hybrid": (lambda path, n: make_nemotron_h(path, pattern="*-E" * n, **SIZES | EXPERTS), "*-E"),
}


@pytest.mark.parametrize(
    "model", ["hybrid", *(pytest.param(m, marks=pytest.mark.full) for m in MODELS if m != "hybrid")]
)
def test_activations_are_what_is_saved(model, tmp_path):
    make, added = MODELS[model]
    for layers in (2, 3):
        make(tmp_path / str(layers), layers)
    out = tmp_path / "bytes.json"
    assert launch(["-m", "tests.distributed.activations", str(tmp_path), str(out)], 1) == 0
    hf = read_config(tmp_path / "2")
    for recompute, measured in json.loads(out.read_text()).items():
        expected = sum(activation_bytes(hf, symbol, 2, recompute) for symbol in added)
        # Not counted: rotary tables, indices, reciprocal norms, states between chunks of the scan; and the experts'
        # padded rows, uneven between layers.
        assert 0.8 * measured < expected < 1.02 * measured, recompute
    kept = json.loads(out.read_text())
    assert kept["full"] < kept["selective"] <= kept["none"]
