"""Objectives by name: values and gradients written down again, token by token."""

import math

import pytest
import torch

from megatron_rlzero.limits import CHOICES
from megatron_rlzero.objectives import CLIP, DELTA, OBJECTIVES
from tests.unit.setups import violations


def make(seed=0):
    """Three responses, the second far off-policy; the last four tokens are padding that belongs to none."""
    generator = torch.Generator().manual_seed(seed)
    response = torch.tensor([0] * 6 + [1] * 5 + [2] * 7 + [3] * 4)
    log_mu = -3 * torch.rand(22, generator=generator, dtype=torch.float64) - 0.05
    noise = 0.1 * torch.randn(22, generator=generator, dtype=torch.float64)
    log_pi = (log_mu + torch.where(response == 1, 20.0, 1.0) * noise).clamp(max=-1e-3)
    advantage = torch.tensor([1.0, -0.5, 0.7, 9.0], dtype=torch.float64)[response]
    action = (torch.arange(22) % 3 != 0) & (response < 3)
    weight = torch.where(action, 1 / torch.bincount(response, action.double())[response], 0.0)
    return log_pi, log_mu, advantage, weight.nan_to_num(), response


def by_hand(name, log_pi, log_mu, advantage, weight, response):
    """Sum over the tokens of (value, gradient by log pi)."""
    rows = list(zip(*(x.tolist() for x in (log_pi, log_mu, advantage, weight, response)), strict=True))
    divergence = dict.fromkeys(range(4), 0.0)
    for pi, mu, _, w, r in rows:
        if w:
            p, q = math.exp(pi), math.exp(mu)
            divergence[r] += w * (q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))
    value, gradients = 0.0, []
    for pi, mu, a, w, r in rows:
        ratio = math.exp(pi - mu)
        clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
        kept = divergence[r] <= DELTA
        part, slope = {
            "reinforce_zero": (a * ratio, a * ratio),
            "no_correction": (a * pi, a),
            "grpo": (min(ratio * a, clipped * a), a * ratio if ratio * a <= clipped * a else 0.0),
            "flash_reinforce": (kept * a * ratio * pi, kept * a * ratio),
        }[name]
        value -= w * part
        gradients.append(-w * slope)
    return value, torch.tensor(gradients, dtype=torch.float64), divergence


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient(name):
    log_pi, *rest = make()
    log_pi.requires_grad_()
    found = OBJECTIVES[name](log_pi, *rest)
    (gradient,) = torch.autograd.grad(found, log_pi)
    value, wanted, divergence = by_hand(name, log_pi.detach(), *rest)
    assert found.item() == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)
    assert divergence[1] > DELTA > max(divergence[0], divergence[2])  # the gate has something to do, and to leave alone


def test_they_differ():
    log_pi, *rest = make()
    log_pi.requires_grad_()
    gradients = [torch.autograd.grad(f(log_pi, *rest), log_pi)[0] for f in OBJECTIVES.values()]
    for i, one in enumerate(gradients):
        assert all(not torch.allclose(one, other, rtol=1e-3) for other in gradients[:i])


def test_all_are_one_on_policy():
    """At equal weights every one has the gradient of REINFORCE."""
    _, log_mu, *rest = make()
    log_pi = log_mu.clone().requires_grad_()
    gradients = [torch.autograd.grad(f(log_pi, log_mu, *rest), log_pi)[0] for f in OBJECTIVES.values()]
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_log_probs_of_other_tokens_are_ignored(name, value):
    log_pi, log_mu, advantage, weight, response = make()
    wanted = OBJECTIVES[name](log_pi, log_mu, advantage, weight, response)
    other = weight == 0
    a, b = torch.where(other, value, log_pi).requires_grad_(), torch.where(other, value, log_mu)
    found = OBJECTIVES[name](a, b, advantage, weight, response)
    assert torch.equal(found, wanted)
    assert torch.autograd.grad(found, a)[0].isfinite().all()


def test_the_configuration_knows_them(empty, good):
    assert set(CHOICES["loop.objective"]) == OBJECTIVES.keys()
    assert "one of" in violations(empty, [*good, "loop.objective=ppo"])[0]
    (found,) = violations(empty, [*good, "loop.objective=grpo", "loop.samples_per_prompt=2"])
    assert found.startswith("loop.objective = grpo: its advantages are normalised by group")
    assert violations(empty, [*good, "loop.objective=grpo", "loop.advantage=grpo", "loop.samples_per_prompt=2"]) == []
