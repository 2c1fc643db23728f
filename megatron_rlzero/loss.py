"""The objective of REINFORCE Zero: the plain, unclipped importance weight on a per-response mean.

    L(theta) = -(1/B) sum_i (1/T_i) sum_t A_i pi_theta(a_it | h_it) / mu_i(a_it | h_it)

B counts the responses of the whole update, T_i the action tokens of the whole response. (Hu et al., REINFORCE Zero:
Kernel Alignment Unlocks Stable Asynchronous RL with Importance Sampling, 2026.)
"""

import torch
from torch import Tensor


def reinforce_zero(log_pi: Tensor, log_mu: Tensor, advantage: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_t weight_t A_t w_t with w = exp(log pi - log mu); only pi is differentiated, so grad w = w grad log pi.

    Args:
        log_pi: fp32 [n], learner's log-probability of each token.
        log_mu: fp32 [n], the log-probability with which it was sampled.
        advantage: fp32 [n], A_i of the token's response.
        weight: fp32 [n], 1 / T_i for action tokens, 0 for all others, whose log-probabilities are ignored.

    Returns:
        The sum over the given tokens, before the division by B, and the weights w [n] (1 where ``weight`` is 0).

    There is no clamp: a ratio that is not finite makes the sum not finite, and the step stops before the optimizer.
    """
    ratio = torch.where(weight > 0, log_pi - log_mu, 0.0).exp()
    return -(weight * advantage * ratio).sum(), ratio.detach()
