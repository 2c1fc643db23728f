"""Torch's form of activations, from exp and log1p: the library's silu and softplus depend on their input's shape."""

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of an fp32 x, for operators that round it together with what comes after."""
    return x / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in fp32, as max(x, 0) + log1p(exp(-|x|)). Its derivative is the sigmoid; see kernels/mamba."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))


def silu_and_mul(x: Tensor) -> Tensor:
    """See ``dispatch.silu_and_mul``."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def silu_and_mul_gradient(x: Tensor, grad: Tensor) -> Tensor:
    # exp overflows for a gate below -88: the sigmoid is then 0 and so are both gradients.
    gate, up = x.float().chunk(2, dim=-1)
    grad, sigmoid = grad.float(), 1 / (1 + (-gate).exp())
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    """See ``dispatch.squared_relu``."""
    return x.float().clamp(min=0).square().to(x.dtype)


def squared_relu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return (grad.float() * 2 * x.float().clamp(min=0)).to(x.dtype)
