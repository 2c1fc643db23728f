"""The comparison operator by operator: nothing differs with aligned kernels, and with stock ones it says where."""

import random

import pytest

from megatron_rlzero.config import Config
from megatron_rlzero.invariance.trace import compare_layers
from tests.parity.runs import tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "operators"),
    [
        ("moe", 2 * 8 + 1),
        ("tied", 2 * 6 + 1),
        ("qwen2", 3 * 4 + 1),
        ("llama", 3 * 4 + 1),
    ],
)
def test_the_first_operator_that_differs_is_named(models, tmp_path, model, operators):
    draw = random.Random(0)
    documents = [tokens(draw, n) for n in (30, 1, 17)]
    found = {}
    for kernels in ("aligned", "stock"):
        config = Config(run_dir=str(tmp_path), kernels=kernels)
        config.model.path, config.model.dtype = str(models[model]), "bf16"
        found[kernels] = compare_layers(config, documents, tmp_path / kernels)
    aligned, stock = found["aligned"], found["stock"]
    assert (aligned.tokens, aligned.operators, aligned.differing, aligned.router_choices) == (48, operators, [], 0)
    assert stock.first.startswith("layer 0: ") and "final norm" in stock.differing
    assert aligned.routed == (2 * 48 if model == "moe" else 0)
