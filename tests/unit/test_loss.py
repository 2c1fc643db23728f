"""The objective: its value written down again, its gradient against autograd of log pi, and no clamp anywhere."""

import math

import pytest
import torch

from megatron_rlzero.loss import reinforce_zero


def make(n=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_pi, log_mu = -torch.rand(2, n, generator=generator, dtype=torch.float64) * 3
    advantage = torch.randn(n, generator=generator, dtype=torch.float64)
    weight = torch.where(torch.rand(n, generator=generator) < 0.6, 1 / 7, 0.0).double()
    return log_pi, log_mu, advantage, weight


def test_value():
    log_pi, log_mu, advantage, weight = make()
    wanted = 0.0
    for lp, lm, a, w in zip(*(x.tolist() for x in (log_pi, log_mu, advantage, weight)), strict=True):
        wanted -= w * a * math.exp(lp) / math.exp(lm)
    loss, ratio = reinforce_zero(log_pi, log_mu, advantage, weight)
    assert float(loss) == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(ratio, torch.where(weight > 0, (log_pi - log_mu).exp(), 1.0))
    assert float(reinforce_zero(log_mu, log_pi, advantage, weight)[0]) != pytest.approx(wanted, rel=1e-2)


def test_gradient_is_w_grad_log_pi():
    """Through a softmax: the gradient of -sum weight A w equals that of -sum weight A sg(w) log pi."""
    _, log_mu, advantage, weight = make()
    logits = torch.randn(40, 9, dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(-1)[:, 3]
    loss, ratio = reinforce_zero(log_pi, log_mu, advantage, weight)
    assert not ratio.requires_grad
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(weight * advantage * ratio * log_pi).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    (uncorrected,) = torch.autograd.grad(-(weight * advantage * log_pi).sum(), logits)
    assert not torch.allclose(uncorrected, wanted, rtol=1e-2)


def test_only_pi_is_differentiated():
    log_pi, log_mu, advantage, weight = make()
    log_pi.requires_grad_()
    (gradient,) = torch.autograd.grad(reinforce_zero(log_pi, log_mu, advantage, weight)[0], log_pi)
    torch.testing.assert_close(gradient, -weight * advantage * (log_pi - log_mu).exp().detach())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_log_probs_of_other_tokens_are_ignored(value):
    log_pi, log_mu, advantage, weight = make()
    wanted, _ = reinforce_zero(log_pi, log_mu, advantage, weight)
    masked = weight == 0
    for pi, mu in ((value, 0.0), (0.0, value), (value, value)):
        a, b = torch.where(masked, pi, log_pi).requires_grad_(), torch.where(masked, mu, log_mu)
        loss, ratio = reinforce_zero(a, b, advantage, weight)
        assert torch.equal(loss, wanted)
        assert ratio[masked].eq(1).all()
        (gradient,) = torch.autograd.grad(loss, a)
        assert gradient.isfinite().all()
        assert gradient[masked].eq(0).all()


@pytest.mark.parametrize(("pi", "mu"), [(math.nan, -1.0), (-1.0, math.nan), (800.0, -1.0), (-1.0, -math.inf)])
def test_a_ratio_that_is_not_finite_shows(pi, mu):
    log_pi, log_mu, advantage, weight = make()
    action = int(weight.nonzero()[0])
    log_pi[action], log_mu[action] = pi, mu
    loss, ratio = reinforce_zero(log_pi, log_mu, advantage, weight)
    assert not loss.isfinite()
    assert not ratio[action].isfinite()


def test_large_and_small_ratios_are_not_clipped():
    one = torch.ones(1)
    for log_ratio in (-20.0, -2.0, 0.0, 2.0, 20.0):
        log_pi = torch.tensor([log_ratio], requires_grad=True)
        loss, ratio = reinforce_zero(log_pi, torch.zeros(1), one, one)
        assert float(ratio) == pytest.approx(math.exp(log_ratio), rel=1e-6)
        (gradient,) = torch.autograd.grad(loss, log_pi)
        assert float(gradient) == pytest.approx(-math.exp(log_ratio), rel=1e-6)


def test_no_token_gives_zero():
    for n in (0, 3):
        log_pi = torch.full((n,), math.nan, requires_grad=True)
        loss, _ = reinforce_zero(log_pi, torch.zeros(n), torch.ones(n), torch.zeros(n))
        assert loss.eq(0)
        assert torch.autograd.grad(loss, log_pi)[0].eq(0).all()
