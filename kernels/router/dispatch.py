"""The choice of experts as learner and engine call it, in the form of the device."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.router import reference


def top_k(
    logits: Tensor,
    k: int,
    renormalise: bool,
    scaling: float = 1.0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_top_k: int = 1,
) -> tuple[Tensor, Tensor]:
    """Scores of all experts, the ``k`` largest of each token, renormalised to sum to 1 if asked.

    Args:
        logits: fp32 [tokens, E].
        scaling: factor on the chosen scores.
        sigmoid: scores are 1 / (1 + exp(-logit)) (DeepSeek-V3, 2024), or else the softmax over all experts.
        bias: fp32 [E] or None, added to the scores for the choice alone; it has no gradient.
        groups: experts form this many groups of neighbours. The score of a group is the sum of its two best experts'
            scores for the choice, and only experts of the ``group_top_k`` best groups are chosen.

    Returns:
        probabilities fp32 [tokens, k] and expert ids int64 [tokens, k], both in ascending expert id.

    Raises:
        ValueError: the groups do not divide the experts, or those that are kept hold fewer than ``k``.

    Of equal scores the lower expert or group id is taken, whatever the library's sort does by default.
    """
    bias = None if bias is None else bias.detach()
    return _TopK.apply(logits, k, renormalise, scaling, sigmoid, bias, groups, group_top_k)


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.router import triton

    return triton


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, renormalise, scaling, sigmoid, bias, groups, group_top_k):
        form = _form(logits)
        scores = form.scores(logits, sigmoid)
        choice = scores if bias is None else scores + bias
        if groups > 1:
            choice = reference.best_groups(choice, k, groups, group_top_k)
        probabilities, experts = form.choose(choice, scores, k, renormalise, scaling)
        ctx.save_for_backward(scores, experts)
        ctx.settings = (renormalise, scaling, sigmoid)
        ctx.mark_non_differentiable(experts)
        return probabilities, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        scores, experts = ctx.saved_tensors
        return _form(scores).gradient(scores, experts, grad, *ctx.settings), *(None,) * 7
