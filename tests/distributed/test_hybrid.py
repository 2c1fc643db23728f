"""Hybrids under several layouts: against the float64 oracle, against transformers, and against one rank."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_dense import BF16, family, run_cases
from tests.distributed.test_learner import (
    EP2,
    PP2,
    SHARDED,
    TP2,
    UNEVEN,
    largest_error,
    oracle_gradients,
    results,
    steps,
)
from tests.tiny import make_nemotron_h, rollouts

BALANCED = {"moe_router_bias_update_rate": 1e-3}
#: Names begin with the model's.
ONE = {
    "moe": UNEVEN,
    "moe_whole": {},
    "moe_bf16": UNEVEN | BF16,
    "moe_balanced": UNEVEN | BALANCED,
    "moe_stock": UNEVEN | {"kernels": "stock"},
    "plain": UNEVEN,
    "plain_bf16": UNEVEN | BF16,
}
TWO = {
    "moe_tp2_ep2": TP2 | EP2 | UNEVEN | SHARDED | {"recompute": "selective"},
    "moe_tp2_ep2_bf16": TP2 | EP2 | UNEVEN | BF16 | {"recompute": "full"},
    "moe_tp2_ep2_balanced": TP2 | EP2 | UNEVEN | BALANCED | {"recompute": "full"},
    "moe_pp2": PP2 | UNEVEN | {"recompute": "full"},
    "moe_pp2_bf16": PP2 | UNEVEN | SHARDED | BF16,
    "plain_tp2": TP2 | UNEVEN,
    "plain_tp2_bf16": TP2 | UNEVEN | SHARDED | BF16,
    "plain_pp2": PP2 | UNEVEN,
    "moe_ep2": EP2 | UNEVEN | SHARDED,
    "moe_tp2_stock": TP2 | UNEVEN | {"kernels": "stock"},
}
FOUR = {
    "moe_tp2_ep2_pp2": TP2 | EP2 | PP2 | UNEVEN | SHARDED,
    "moe_tp2_ep2_pp2_bf16": TP2 | EP2 | PP2 | UNEVEN | BF16,
}
#: Layouts in which every rank's sums are over the same elements as one rank's: equal to the bit.
EXACT = [name for name in TWO if name not in ("moe_ep2", "moe_tp2_stock")]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "moe": make_nemotron_h(root / "moe"),
        "plain": make_nemotron_h(root / "plain", pattern="M-*M", n_groups=2),
    }


@pytest.fixture(scope="module")
def one(models, tmp_path_factory) -> Path:
    return run_cases(1, ONE, models, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(models, tmp_path_factory) -> Path:
    return run_cases(2, TWO, models, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", ["moe", "moe_whole", "moe_stock", "plain"])
def test_loss_and_gradients_equal_the_float64_oracle(models, one, name):
    loss, gradients = oracle_gradients(models[family(name)])
    gradients = {k: v for k, v in gradients.items() if not k.endswith("e_score_correction_bias")}
    assert steps(one, name)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_error(results(one, name, "grad."), gradients) < 1e-5
    assert largest_error(results(one, name, "grad."), {k: v * 12 / 11 for k, v in gradients.items()}) > 1e-2


@pytest.mark.parametrize("name", ["moe", "plain"])
def test_log_probs_are_those_of_transformers(models, one, name):
    """Its lower bound of the time step included, which about half of the steps are below."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    log_pi, at, worst, unbounded = results(one, name, "log_pi")[""], 0, 0.0, 0.0
    mixers = [m for m in reference.modules() if hasattr(m, "time_step_limit")]
    for r in rollouts(12):
        tokens = torch.from_numpy(r.tokens).long()
        mine = log_pi[at + 1 : at + len(tokens)]
        found = []
        for least in (0.01, 0.0):
            for mixer in mixers:
                mixer.time_step_limit = (least, float("inf"))
            with torch.no_grad():
                logits = reference(tokens[None]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            found.append(float((mine - expected).abs().max()))
        worst, unbounded = max(worst, found[0]), max(unbounded, found[1])
        at += len(tokens)
    assert 0 < worst < 1e-4
    assert unbounded > 1e-3


@pytest.mark.parametrize("name", EXACT)
def test_layouts_equal_one_rank_to_the_bit(one, two, name):
    assert_exact(one, two, name)


@pytest.mark.full
def test_four_ranks_equal_one_to_the_bit(models, one, tmp_path):
    run_cases(4, FOUR, models, tmp_path)
    for name in FOUR:
        assert_exact(one, tmp_path, name)


def assert_exact(one: Path, out: Path, name: str) -> None:
    """Log-probs, gradients, and weights after three clipped steps, in the same microbatches."""
    reference = family(name) + next((kind for kind in ("_bf16", "_balanced") if kind in name), "")
    mine, theirs = load_file(out / f"{name}.safetensors"), load_file(one / f"{reference}.safetensors")
    assert mine.keys() <= theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []
    assert steps(out, name) == steps(one, reference)
    assert all(step["grad_norm"] > 0.5 for step in steps(out, name))  # the limit: every step was clipped


def test_the_comparison_with_one_rank_can_fail(one, two):
    """Experts that data-parallel ranks share add up other groups of tokens; stock kernels add in other orders."""
    for name, reference in (("moe_ep2", "moe"), ("moe_tp2_stock", "moe_stock"), ("moe_stock", "moe")):
        a = load_file((one if name in ONE else two) / f"{name}.safetensors")
        b = load_file(one / f"{reference}.safetensors")
        assert any(not torch.equal(a[k], b[k]) for k in a if k.startswith("weight."))


@pytest.mark.parametrize("name", ["moe_ep2", "moe_tp2_stock"])
def test_other_layouts_agree_with_one_rank(one, two, name):
    reference = "moe_stock" if "stock" in name else "moe"
    mine, theirs = (load_file(p) for p in (two / f"{name}.safetensors", one / f"{reference}.safetensors"))
    assert torch.equal(mine["log_pi"], theirs["log_pi"]) == ("stock" not in name)
    for a, b in zip(steps(two, name), steps(one, reference), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert largest_error(results(two, name, "weight."), results(one, reference, "weight.")) < 1e-5


def test_the_expert_bias_moves_by_its_rate(models, one):
    """Once in each of the four backward passes, and not where the rate is 0."""
    original = load_file(models["moe"] / "model.safetensors")
    for name, rate in (("moe", 0.0), ("moe_balanced", 1e-3)):
        trained = load_file(one / name / "model.safetensors")
        for key in (k for k in trained if k.endswith("e_score_correction_bias")):
            moved = (trained[key] - original[key]).double()
            assert float(moved.abs().max()) == pytest.approx(4 * rate, rel=1e-3)
            assert float((moved / 1e-3).frac().abs().sub(0.5).abs().min()) > 0.49  # whole steps


def test_a_bf16_model_keeps_fp32_where_the_checkpoint_has_it(models, one, two):
    """A, D, time-step and expert biases lose no bit on the way in; those that are trained leave the bf16 grid."""
    kept = (".A_log", ".D", ".dt_bias", ".e_score_correction_bias")
    original = load_file(models["moe"] / "model.safetensors")
    for out, name in ((one, "moe_bf16"), (two, "moe_tp2_ep2_bf16")):
        exported = load_file(out / name / "model.safetensors")
        assert exported.keys() == original.keys()
        for k, v in exported.items():
            assert v.dtype == (torch.float32 if k.endswith(kept) else torch.bfloat16)
        for k in (k for k in exported if k.endswith(kept)):
            buffer = k.endswith("e_score_correction_bias")
            assert torch.equal(exported[k], original[k]) == buffer
            assert not torch.equal(exported[k], exported[k].bfloat16().float())
            assert float((exported[k] - original[k]).abs().max()) < 0.01
