"""SwiGLU's activation: silu is built from exp, since the library's own depends on the shape it is called with."""

import torch
from torch import Tensor


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
        return (gate / (1 + (-gate).exp()) * up).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        # exp overflows for a gate below -88: the sigmoid is then 0 and so are both gradients.
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        grad, sigmoid = grad.float(), 1 / (1 + (-gate).exp())
        grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1).to(x.dtype)
