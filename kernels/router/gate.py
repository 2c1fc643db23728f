"""The router's gate: fp32 logits whatever the model's dtype."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels.linear import linear, weight_gradient
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
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = linear(grad, weight.float().T).to(x.dtype)
        grad_weight = weight_gradient(gather(grad, ctx.rows), gather(x, ctx.rows).float())
        return grad_x, grad_weight.to(weight.dtype), None
