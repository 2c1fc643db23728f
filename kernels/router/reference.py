"""Top-k routing: fp32 gate and scores, the lowest expert id on ties."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.reduction import gather

#: Added to the sum of the chosen scores before the division; sigmoids may all be zero.
LEAST_TOTAL = 1e-20


def gate(x: Tensor, weight: Tensor, rows: ProcessGroup | None = None) -> Tensor:
    """fp32 router logits [tokens, E] of x [tokens, H] and weight [E, H], whatever dtype those have.

    Args:
        rows: ranks over which the tokens are split. The gradient of ``weight`` is the whole one on every rank.
    """
    return _Gate.apply(x, weight, rows)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = linear(grad, weight.float().T).to(x.dtype)
        grad_weight = gather(grad, ctx.rows).T @ gather(x, ctx.rows).float()
        return grad_x, grad_weight.to(weight.dtype), None


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
    scores = _Sigmoid.apply(logits) if sigmoid else torch.softmax(logits, dim=-1)
    choice = scores.detach() if bias is None else scores.detach() + bias.detach()
    if groups > 1:
        choice = _best_groups(choice, k, groups, group_top_k)
    experts = _largest(choice, k).sort(dim=-1).values
    probabilities = scores.gather(1, experts)
    if renormalise:
        total = probabilities[:, 0]
        for slot in range(1, k):
            total = total + probabilities[:, slot]
        probabilities = probabilities / (total + LEAST_TOTAL)[:, None]
    return probabilities * scaling, experts


def _best_groups(choice: Tensor, k: int, groups: int, group_top_k: int) -> Tensor:
    """``choice`` with -inf in all but the ``group_top_k`` best groups of each token."""
    tokens, count = choice.shape
    if count % groups or count // groups < 2 or not 0 < group_top_k <= groups or count // groups * group_top_k < k:
        raise ValueError(
            f"top-{k} of {count} experts in the best {group_top_k} of {groups} groups; expected are groups of one "
            "size, two experts at least, which hold k experts together"
        )
    grouped = choice.unflatten(1, (groups, -1))
    best = grouped.sort(dim=-1, descending=True).values
    kept = _largest(best[..., 0] + best[..., 1], group_top_k)
    dropped = torch.ones(tokens, groups, dtype=torch.bool, device=choice.device).scatter_(1, kept, False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of each row, the lowest index first on ties."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]


class _Sigmoid(torch.autograd.Function):
    """From exp, since the library's own depends on the shape; exp overflows below -88, where both results are 0."""

    @staticmethod
    def forward(ctx, x):
        scores = 1 / (1 + (-x).exp())
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx, grad):
        (scores,) = ctx.saved_tensors
        return grad * scores * (1 - scores)
