"""Objectives by name: the default of ``loss.py``, and others to compare it with, ten lines each.

Each takes log_pi and log_mu, fp32 [n], of the tokens, the advantage of each token's response, ``weight``, 1 / T_i for
action tokens and else 0, and ``response``, int64 [n], which tokens belong together; it returns the sum over the tokens,
before the division by B. Log-probabilities where the weight is 0 are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rlzero import loss

Objective = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
#: half of the clip range of ``grpo``; largest mean divergence of a response that ``flash_reinforce`` keeps, nats
CLIP, DELTA = 0.2, 1e-2


def reinforce_zero(log_pi: Tensor, log_mu: Tensor, advantage: Tensor, weight: Tensor, response: Tensor) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t A_i w_it, w = pi / mu: the default; Hu et al., REINFORCE Zero, 2026."""
    return loss.reinforce_zero(log_pi, log_mu, advantage, weight)[0]


def no_correction(log_pi: Tensor, log_mu: Tensor, advantage: Tensor, weight: Tensor, response: Tensor) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t A_i log pi_it, as if mu were pi; Williams, REINFORCE, 1992."""
    return -(weight * advantage * torch.where(weight > 0, log_pi, 0.0)).sum()


def grpo(log_pi: Tensor, log_mu: Tensor, advantage: Tensor, weight: Tensor, response: Tensor) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t min(w A, clip(w, 1 - eps, 1 + eps) A), eps = CLIP, mu as the old policy, without KL.

    Shao et al., DeepSeekMath, 2024, arXiv:2402.03300, with loop.advantage = grpo.
    """
    ratio = torch.where(weight > 0, log_pi - log_mu, 0.0).exp()
    return -(weight * torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)).sum()


def flash_reinforce(log_pi: Tensor, log_mu: Tensor, advantage: Tensor, weight: Tensor, response: Tensor) -> Tensor:
    """-(1/B) sum_i (m_i / T_i) sum_t A_i sg(w_it) log pi_it; m_i = 1 where the mean divergence of i is at most DELTA.

    The divergence of a token is that of two Bernoulli variables, KL(mu || pi) = mu log(mu / pi) + (1 - mu)
    log((1 - mu) / (1 - pi)). FlashREINFORCE, public repository, 2026; which side comes first is not said there.
    """
    log_pi, log_mu = (torch.where(weight > 0, x, -1.0) for x in (log_pi, log_mu))
    mu, other, other_pi = log_mu.exp(), -log_mu.expm1(), -log_pi.detach().expm1()
    divergence = mu * (log_mu - log_pi.detach()) + torch.xlogy(other, other) - torch.xlogy(other, other_pi)
    mean = torch.zeros(int(response.max()) + 1, dtype=weight.dtype, device=weight.device)
    kept = mean.index_add(0, response, weight * divergence)[response] <= DELTA
    return -(weight * kept * advantage * (log_pi - log_mu).detach().exp() * log_pi).sum()


OBJECTIVES: dict[str, Objective] = {f.__name__: f for f in (reinforce_zero, flash_reinforce, grpo, no_correction)}
