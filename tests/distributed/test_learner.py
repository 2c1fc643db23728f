"""The learner under every layout: against a float64 oracle, against transformers, and against one rank."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlzero.architectures import read_config
from megatron_rlzero.architectures.layouts import Parallel
from megatron_rlzero.convert import to_megatron
from megatron_rlzero.launch import launch
from tests import oracle
from tests.tiny import make_qwen3_moe, rollouts

TP2 = {"tensor_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
#: Microbatches of at most 64 tokens: several of uneven load on every rank.
UNEVEN = {"max_tokens_per_microbatch": 64}
SHARDED = {"optimizer_use_distributed_optimizer": True}

#: Coefficients at which the router's own losses are most of its gradient.
BALANCE, Z = 0.2, 0.02

CASES = {
    1: {
        "one": {},
        "one_microbatched": UNEVEN,
        "one_microbatched_bf16": UNEVEN | {"dtype": "bf16"},
        "one_balanced": {"moe_aux_loss_coeff": BALANCE},
        "one_microbatched_z": UNEVEN | {"moe_z_loss_coeff": Z},
        "likelihood": {"likelihood": True},
        "warm": {"temperature": 0.7},
        "stock": {"kernels": "stock"} | UNEVEN,
    },
    2: {
        "dp2": {},
        "dp2_microbatched": UNEVEN,
        "dp2_sharded_recompute": UNEVEN | SHARDED | {"recompute": "selective"},
        "tp2": TP2 | UNEVEN,
        "tp2_stock": TP2 | UNEVEN | {"kernels": "stock"},
        "ep2": EP2 | UNEVEN | SHARDED,
        "pp2": PP2 | UNEVEN | {"recompute": "full"},
        "pp2_sharded_bf16": PP2 | UNEVEN | SHARDED | {"dtype": "bf16"},
        "tp2_ep2": TP2 | EP2 | UNEVEN,
        "tp2_ep2_z": TP2 | EP2 | UNEVEN | {"moe_z_loss_coeff": Z},
        "dp2_z": UNEVEN | {"moe_z_loss_coeff": Z},
        "tp2_ep2_sharded_recompute": TP2 | EP2 | UNEVEN | SHARDED | {"recompute": "selective"},
        "tp2_ep2_sharded_bf16": TP2 | EP2 | UNEVEN | SHARDED | {"dtype": "bf16", "recompute": "full"},
    },
}
#: Layouts in which every rank's sums are over the same elements as one rank's: equal to the bit.
EXACT = ["pp2", "pp2_sharded_bf16", "tp2_ep2", "tp2_ep2_sharded_recompute", "tp2_ep2_sharded_bf16"]
OWN_LOSSES = ["one_balanced", "one_microbatched_z", "tp2_ep2_z", "dp2_z"]
EP4 = {"expert_model_parallel_size": 4}
TP4 = {"tensor_model_parallel_size": 4}
#: Four ranks: names say which are exact.
FOUR = {
    "exact_tp2_ep2_pp2_bf16": TP2 | EP2 | PP2 | UNEVEN | SHARDED | {"dtype": "bf16"},
    "exact_tp4_ep4": TP4 | EP4 | UNEVEN | SHARDED,
}
#: world size -> more cases
FULL = {
    4: {
        "exact_tp2_ep2_pp2": TP2 | EP2 | PP2 | UNEVEN | SHARDED | {"recompute": "full"},
        "exact_tp4_ep4_bf16": TP4 | EP4 | UNEVEN | {"dtype": "bf16"},
        "tp2_ep4": TP2 | EP4 | UNEVEN,
        "tp2_pp2": TP2 | PP2 | UNEVEN | SHARDED,
        "dp2_pp2_ep2": PP2 | EP2 | UNEVEN | SHARDED | {"recompute": "full"},
    },
    # every combination, each with the data-parallel size that fills eight ranks
    8: {
        f"tp{tp}_ep{ep}_pp{pp}": {
            "tensor_model_parallel_size": tp,
            "expert_model_parallel_size": ep,
            "pipeline_model_parallel_size": pp,
        }
        | UNEVEN
        for tp in (1, 2, 4)
        for ep in (1, 2, 4)
        for pp in (1, 2)
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("model"))


def run(world: int, cases: dict, model: Path, out: Path) -> Path:
    plan = {"model": str(model), "out": str(out), "cases": [{"name": n, **c} for n, c in cases.items()]}
    (out / f"cases{world}.json").write_text(json.dumps(plan))
    assert launch(["-m", "tests.distributed.ranks", str(out / f"cases{world}.json")], world) == 0
    return out


@pytest.fixture(scope="module")
def one(model, tmp_path_factory) -> Path:
    return run(1, CASES[1], model, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(model, tmp_path_factory) -> Path:
    return run(2, CASES[2], model, tmp_path_factory.mktemp("two"))


def results(out: Path, name: str, prefix: str) -> dict[str, torch.Tensor]:
    return {
        k.removeprefix(prefix): v.double()
        for k, v in load_file(out / f"{name}.safetensors").items()
        if k.startswith(prefix)
    }


def steps(out: Path, name: str) -> list[dict]:
    return json.loads((out / f"{name}.json").read_text())["steps"]


def largest_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, relative to the largest element of that tensor in ``b``."""
    assert a.keys() == b.keys() and a
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp_min(1e-30)) for k in b)


def responses(likelihood: bool, hf: dict, weights: dict) -> list[dict]:
    advantages = torch.ones(12) if likelihood else torch.linspace(-1.5, 1.0, 12)
    result = []
    for r, advantage in zip(rollouts(12), advantages, strict=True):
        tokens = torch.from_numpy(r.tokens).long()
        log_mu = torch.from_numpy(r.logprobs).double()
        if likelihood:
            with torch.no_grad():
                log_mu = torch.nn.functional.pad(oracle.log_probs(hf, weights, tokens), (1, 0))
        result.append(
            {
                "tokens": tokens,
                "action": torch.from_numpy(r.action_mask),
                "log_mu": log_mu,
                "advantage": float(advantage),
            }
        )
    return result


def oracle_gradients(model: Path, likelihood: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    hf = read_config(model)
    weights = {k: v.double().requires_grad_() for k, v in load_file(model / "model.safetensors").items()}
    loss = oracle.objective(hf, weights, responses(likelihood, hf, weights))
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    return float(loss.detach()), dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("name", ["one", "one_microbatched", "stock", "dp2", "dp2_microbatched"])
def test_loss_and_gradients_equal_the_float64_oracle(model, one, two, name):
    out = one if name in CASES[1] else two
    loss, gradients = oracle_gradients(model)
    assert steps(out, name)[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_error(results(out, name, "grad."), gradients) < 1e-5
    assert (steps(out, name)[0]["microbatches"] > 1) == ("microbatched" in name or name == "stock")
    # The comparison can fail: another normalisation is far outside the tolerance.
    assert largest_error(results(out, name, "grad."), {k: v * 12 / 11 for k, v in gradients.items()}) > 1e-2


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_the_routers_own_losses_are_means_over_the_tokens(model, one, two, name):
    hf, out = read_config(model), one if name in CASES[1] else two
    weights = {k: v.double().requires_grad_() for k, v in load_file(model / "model.safetensors").items()}
    balance, z = oracle.router_losses(hf, weights, responses(False, hf, weights))
    own = torch.autograd.grad(
        BALANCE * balance if "balanced" in name else Z * z,
        list(weights.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    plain = oracle_gradients(model)[1]
    wanted = {k: plain[k] + g for k, g in zip(weights, own, strict=True)}
    assert largest_error(results(out, name, "grad."), wanted) < 1e-5
    for factor in (0.0, 0.9):
        other = {k: plain[k] + factor * g for k, g in zip(weights, own, strict=True)}
        assert largest_error(results(out, name, "grad."), other) > 1e-3


def test_stock_kernels_compute_the_same_function_in_other_bits(one, two):
    stock, aligned = results(one, "stock", "log_pi")[""], results(one, "one_microbatched", "log_pi")[""]
    assert 0 < float((stock - aligned).abs().max()) < 1e-5


def test_likelihood_is_the_same_objective_with_mu_in_its_place(model, one):
    loss, gradients = oracle_gradients(model, likelihood=True)
    assert loss == pytest.approx(-11 / 12)  # one of the twelve responses has no action token
    assert steps(one, "likelihood")[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert largest_error(results(one, "likelihood", "grad."), gradients) < 1e-5


@pytest.mark.parametrize("name", [n for n in CASES[2] if n not in (*EXACT, *OWN_LOSSES)])
def test_layouts_agree_with_one_rank(one, two, name):
    assert_agrees(one, two, name)


@pytest.mark.full
def test_four_ranks_equal_one_to_the_bit(one, model, tmp_path):
    run(4, FOUR, model, tmp_path)
    for name in FOUR:
        assert_exact(one, tmp_path, name)


@pytest.mark.full
@pytest.mark.parametrize("world", FULL)
def test_more_layouts_agree_with_one_rank(one, model, tmp_path, world):
    names = list(FULL[world])
    for first in range(0, len(names), 3):  # every case leaves its process groups, and their threads, to the process
        run(world, {name: FULL[world][name] for name in names[first : first + 3]}, model, tmp_path)
    for name in names:
        (assert_exact if name.startswith("exact") else assert_agrees)(one, tmp_path, name)


@pytest.mark.parametrize("name", EXACT)
def test_layouts_equal_one_rank_to_the_bit(one, two, name):
    assert_exact(one, two, name)


def test_a_checkpoint_of_one_layout_trains_on_under_another(one, model, tmp_path):
    """Written as eight ranks would, TP2 x EP2 x PP2; the model that the ranks start from has other weights."""
    other = make_qwen3_moe(tmp_path / "other", seed=1)
    to_megatron(model, tmp_path / "saved", Parallel(8, 2, 2, 2))
    names = [name for name in EXACT if "bf16" not in name]
    run(2, {name: CASES[2][name] | {"checkpoint": str(tmp_path / "saved")} for name in names}, other, tmp_path)
    assert names
    for name in names:
        assert_exact(one, tmp_path, name)
        assert [s["loss"] for s in steps(tmp_path, name)] == [s["loss"] for s in steps(one, "one_microbatched")]


def assert_exact(one: Path, out: Path, name: str) -> None:
    """Log-probs, gradients, and weights after three clipped steps, in the same microbatches."""
    reference = "one_microbatched_bf16" if "bf16" in name else "one_microbatched"
    mine, theirs = load_file(out / f"{name}.safetensors"), load_file(one / f"{reference}.safetensors")
    assert mine.keys() <= theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []
    assert steps(out, name) == steps(one, reference)
    assert all(step["grad_norm"] > 0.5 for step in steps(out, name))  # the limit: every step was clipped
    other = load_file(one / "one.safetensors")  # the same in one microbatch differs: the comparison can fail
    assert any(not torch.equal(mine[k], other[k]) for k in mine if k.startswith("weight."))


def assert_agrees(one: Path, out: Path, name: str) -> None:
    """The same log-probs and entropies to the bit, and the same step up to rounding.

    Stock kernels agree up to rounding in everything. Experts that several ranks share, and data parallelism, add the
    gradients of other groups of tokens than one rank does.
    """
    stock = "stock" in name
    for mine, theirs in zip(steps(out, name), steps(one, "one"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    mine, theirs = load_file(out / f"{name}.safetensors"), load_file(one / "one.safetensors")
    for scored in ("log_pi", "entropy"):
        assert torch.equal(mine[scored], theirs[scored]) == (not stock)
        assert float((mine[scored] - theirs[scored]).abs().max()) < 1e-5
    assert largest_error(results(out, name, "weight."), results(one, "one", "weight.")) < 1e-5
    assert largest_error(results(out, name, "weight."), results(one, "likelihood", "weight.")) > 1e-4
    if gradients := results(out, name, "grad."):
        assert largest_error(gradients, results(one, "one", "grad.")) < (1e-5 if stock else 1e-6)


@pytest.mark.parametrize("name", ["one", "tp2_ep2", "pp2"])
def test_log_probs_are_those_of_transformers(model, one, two, name):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_pi, at, worst = results(one if name == "one" else two, name, "log_pi")[""], 0, 0.0
    for r in rollouts(12):
        tokens = torch.from_numpy(r.tokens).long()
        with torch.no_grad():
            expected = reference(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        assert log_pi[at] == 0  # nothing predicts a first token
        worst = max(worst, float((log_pi[at + 1 : at + len(tokens)] - expected).abs().max()))
        at += len(tokens)
    assert 0 < worst < 1e-4


def test_temperature_divides_the_logits(model, one):
    hf, at = read_config(model), 0
    weights = {k: v.double() for k, v in load_file(model / "model.safetensors").items()}
    weights["lm_head.weight"] /= 0.7
    warm, log_pi = results(one, "warm", "log_pi")[""], results(one, "one", "log_pi")[""]
    for r in rollouts(3):
        expected = oracle.log_probs(hf, weights, torch.from_numpy(r.tokens).long())
        torch.testing.assert_close(warm[at + 1 : at + len(r.tokens)], expected, atol=1e-4, rtol=0)
        at += len(r.tokens)
    assert (warm - log_pi).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["one", "tp2_ep2", "pp2", "ep2", "one_microbatched_bf16", "tp2_ep2_sharded_bf16"])
def test_exported_directory_has_the_learners_weights_and_loads(model, one, two, name):
    from transformers import AutoModelForCausalLM

    out = one if name in CASES[1] else two
    exported = load_file(out / name / "model.safetensors")
    learner = {k: v for k, v in load_file(out / f"{name}.safetensors").items() if k.startswith("weight.")}
    original = load_file(model / "model.safetensors")
    assert exported.keys() == original.keys()
    for k, v in exported.items():
        assert torch.equal(v, learner[f"weight.{k}"]) and v.dtype == (
            torch.bfloat16 if "bf16" in name else torch.float32
        )
    assert any(not torch.equal(v.float(), original[k]) for k, v in exported.items())
    assert not list(out.glob("*.partial"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(out / name).named_parameters())
    assert torch.equal(loaded["model.embed_tokens.weight"], exported["model.embed_tokens.weight"])
