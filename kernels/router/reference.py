"""Top-k routing: fp32 gate and scores, the lowest expert id on ties."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.reduction import gather


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


def top_k(logits: Tensor, k: int, renormalise: bool, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the ``k`` largest of each token, renormalised to sum to 1 if asked.

    Args:
        logits: fp32 [tokens, E].
        scaling: factor on the chosen probabilities.

    Returns:
        probabilities fp32 [tokens, k] and expert ids int64 [tokens, k], both in ascending expert id.

    Of equal scores the lower expert id is taken, whatever the library's sort does by default.
    """
    scores = torch.softmax(logits, dim=-1)
    chosen = torch.sort(scores.detach(), dim=-1, descending=True, stable=True).indices[:, :k]
    experts = chosen.sort(dim=-1).values
    probabilities = scores.gather(1, experts)
    if renormalise:
        total = probabilities[:, 0]
        for slot in range(1, k):
            total = total + probabilities[:, slot]
        probabilities = probabilities / total[:, None]
    return probabilities * scaling, experts
