"""Activations as learner and engine call them, in the form of the device."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.activation import reference


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        x: [..., 2 I], the gate first.

    Returns:
        [..., I], dtype of ``x``; fp32 inside, rounded once.
    """
    return _SiluAndMul.apply(x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., Primer, 2021), dtype of ``x``; fp32 inside, rounded once."""
    return _SquaredReLU.apply(x)


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.activation import triton

    return triton


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _form(x).silu_and_mul(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return _form(x).silu_and_mul_gradient(x, grad)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _form(x).squared_relu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return _form(x).squared_relu_gradient(x, grad)
