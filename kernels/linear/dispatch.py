"""Linear as learner and engine call it, in the form of the device."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.linear import reference
from megatron_rlzero.kernels.reduction import row_sum


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.

    Args:
        x: [..., K].
        weight: [N, K], dtype of ``x``.
        bias: [N] or None.

    Returns:
        [..., N], dtype of ``x``; products are accumulated in fp32 and rounded once.
    """
    return _Linear.apply(x, weight, bias) if backend.triton(x) else reference.linear(x, weight, bias)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, the gradient of ``linear``'s weight: [N, K] of grad [tokens, N] and x [tokens, K], their dtype."""
    return _form(x).weight_gradient(grad, x)


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.linear import triton

    return triton


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return _form(x).linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = _form(x).linear(rows, weight.T, None).view(x.shape)
        grad_bias = row_sum(rows).to(grad.dtype) if ctx.biased else None
        return grad_x, weight_gradient(rows, x.reshape(-1, x.shape[-1])), grad_bias
