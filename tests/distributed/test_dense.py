"""A dense Qwen3 with tied embeddings under several layouts: against the float64 oracle and against one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_learner import (
    PP2,
    SHARDED,
    TP2,
    UNEVEN,
    largest_error,
    oracle_gradients,
    results,
    run,
    steps,
)
from tests.tiny import make_qwen3

ONE = {"one": UNEVEN, "one_bf16": UNEVEN | {"dtype": "bf16"}}
TWO = {
    "tp2": TP2 | UNEVEN | SHARDED | {"recompute": "selective"},
    "tp2_bf16": TP2 | UNEVEN | {"dtype": "bf16", "recompute": "full"},
    "pp2": PP2 | UNEVEN | SHARDED,
    "dp2": UNEVEN | SHARDED,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def one(model, tmp_path_factory) -> Path:
    return run(1, ONE, model, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(model, tmp_path_factory) -> Path:
    return run(2, TWO, model, tmp_path_factory.mktemp("two"))


def test_loss_and_gradients_equal_the_float64_oracle(model, one):
    loss, gradients = oracle_gradients(model)
    assert steps(one, "one")[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_error(results(one, "one", "grad."), gradients) < 1e-5
    assert largest_error(results(one, "one", "grad."), {k: v * 12 / 11 for k, v in gradients.items()}) > 1e-2


@pytest.mark.parametrize("name", ["tp2", "tp2_bf16"])
def test_tensor_parallel_equals_one_rank_to_the_bit(one, two, name):
    reference = "one_bf16" if "bf16" in name else "one"
    mine, theirs = load_file(two / f"{name}.safetensors"), load_file(one / f"{reference}.safetensors")
    assert mine.keys() <= theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []
    assert steps(two, name) == steps(one, reference)
    other = load_file(two / "dp2.safetensors")  # the sum over data-parallel ranks has another order
    assert any(not torch.equal(other[k], mine[k]) for k in mine if k.startswith("weight."))


@pytest.mark.parametrize("name", ["pp2", "dp2"])
def test_other_layouts_agree_with_one_rank(one, two, name):
    """Under pipeline parallelism the tied weight's two gradients are added after the microbatches, not before."""
    assert torch.equal(load_file(two / f"{name}.safetensors")["log_pi"], load_file(one / "one.safetensors")["log_pi"])
    for a, b in zip(steps(two, name), steps(one, "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert largest_error(results(two, name, "weight."), results(one, "one", "weight.")) < 1e-5
