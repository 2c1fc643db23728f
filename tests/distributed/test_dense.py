"""Dense families under several layouts: against the float64 oracle, against transformers, and against one rank."""

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
from tests.tiny import LLAMA3, make_llama, make_qwen2, make_qwen3, rollouts

pytestmark = pytest.mark.full

BF16 = {"dtype": "bf16"}
#: Names begin with the model's.
ONE = {
    "qwen3": UNEVEN,
    "qwen3_bf16": UNEVEN | BF16,
    "qwen2": UNEVEN,
    "qwen2_bf16": UNEVEN | BF16,
    "qwen2_stock": UNEVEN | {"kernels": "stock"},
    "llama": UNEVEN,
}
TWO = {
    "qwen3_tp2": TP2 | UNEVEN | SHARDED | {"recompute": "selective"},
    "qwen3_tp2_bf16": TP2 | UNEVEN | BF16 | {"recompute": "full"},
    "qwen3_pp2": PP2 | UNEVEN | SHARDED,
    "qwen3_dp2": UNEVEN | SHARDED,
    "qwen2_tp2": TP2 | UNEVEN,
    "qwen2_tp2_bf16": TP2 | UNEVEN | BF16,
    "qwen2_tp2_stock": TP2 | UNEVEN | {"kernels": "stock"},
    "qwen2_pp2": PP2 | UNEVEN | SHARDED,  # two layers and one
    "llama_tp2": TP2 | UNEVEN | {"recompute": "selective"},
}
EXACT = [n for n in TWO if "stock" not in n and n not in ("qwen3_pp2", "qwen3_dp2")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_qwen3(root / "qwen3", tie_word_embeddings=True),
        "qwen2": make_qwen2(root / "qwen2"),
        "llama": make_llama(root / "llama", tie_word_embeddings=True, rope_parameters=LLAMA3),
    }


def family(name: str) -> str:
    return name.split("_")[0]


def run_cases(world: int, cases: dict, models: dict[str, Path], out: Path) -> Path:
    cases = {name: case | {"model": str(models[family(name)])} for name, case in cases.items()}
    return run(world, cases, next(iter(models.values())), out)


@pytest.fixture(scope="module")
def one(models, tmp_path_factory) -> Path:
    return run_cases(1, ONE, models, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(models, tmp_path_factory) -> Path:
    return run_cases(2, TWO, models, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen2_stock", "llama"])
def test_loss_and_gradients_equal_the_float64_oracle(models, one, name):
    loss, gradients = oracle_gradients(models[family(name)])
    assert steps(one, name)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_error(results(one, name, "grad."), gradients) < 1e-5
    assert largest_error(results(one, name, "grad."), {k: v * 12 / 11 for k, v in gradients.items()}) > 1e-2


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_log_probs_are_those_of_transformers(models, one, name):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    log_pi, at, worst = results(one, name, "log_pi")[""], 0, 0.0
    for r in rollouts(12):
        tokens = torch.from_numpy(r.tokens).long()
        with torch.no_grad():
            expected = reference(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        worst = max(worst, float((log_pi[at + 1 : at + len(tokens)] - expected).abs().max()))
        at += len(tokens)
    assert 0 < worst < 1e-4


@pytest.mark.parametrize("name", EXACT)
def test_layouts_equal_one_rank_to_the_bit(one, two, name):
    reference = family(name) + ("_bf16" if "bf16" in name else "")
    mine, theirs = load_file(two / f"{name}.safetensors"), load_file(one / f"{reference}.safetensors")
    assert mine.keys() <= theirs.keys()
    assert any(k.endswith("k_proj.bias") for k in mine) == (family(name) == "qwen2")
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []
    assert steps(two, name) == steps(one, reference)


def test_the_comparison_with_one_rank_can_fail(one, two):
    """The sum over data-parallel ranks has another order; stock kernels have others everywhere."""
    for name, reference in (("qwen3_dp2", "qwen3"), ("qwen2_tp2_stock", "qwen2_stock"), ("qwen2_stock", "qwen2")):
        a = load_file((one if name in ONE else two) / f"{name}.safetensors")
        b = load_file(one / f"{reference}.safetensors")
        assert any(not torch.equal(a[k], b[k]) for k in a if k.startswith("weight."))


@pytest.mark.parametrize("name", ["qwen3_pp2", "qwen3_dp2", "qwen2_tp2_stock"])
def test_other_layouts_agree_with_one_rank(one, two, name):
    """Under pipeline parallelism the tied weight's two gradients are added after the microbatches, not before."""
    reference = "qwen2_stock" if "stock" in name else "qwen3"
    mine, theirs = (load_file(p) for p in (two / f"{name}.safetensors", one / f"{reference}.safetensors"))
    assert torch.equal(mine["log_pi"], theirs["log_pi"]) == ("stock" not in name)
    for a, b in zip(steps(two, name), steps(one, reference), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert largest_error(results(two, name, "weight."), results(one, reference, "weight.")) < 1e-5
