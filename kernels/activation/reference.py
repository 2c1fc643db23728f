"""Activations from exp and log1p, since the library's silu and softplus depend on the shape they are called with."""

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of an fp32 x, for operators that round it together with what comes after."""
    return x / (1 + (-x).exp())


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        x: [..., 2 I], the gate first.

    Returns:
        [..., I], dtype of ``x``; fp32 inside, rounded once.
    """
    return _SiluAndMul.apply(x)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, dim=-1)
        return (silu(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        # exp overflows for a gate below -88: the sigmoid is then 0 and so are both gradients.
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        grad, sigmoid = grad.float(), 1 / (1 + (-gate).exp())
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al., Primer, 2021), dtype of ``x``; fp32 inside, rounded once."""
    return _SquaredReLU.apply(x)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.float().clamp(min=0).square().to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad.float() * 2 * x.float().clamp(min=0)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in fp32, as max(x, 0) + log1p(exp(-|x|)). Its derivative is the sigmoid; see kernels/mamba."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))
