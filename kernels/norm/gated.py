"""The gated norm of Mamba-2: an RMSNorm over groups of channels, after the product with silu of a gate."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels.activation import silu
from megatron_rlzero.kernels.norm.reference import mean_scale, row_total
from megatron_rlzero.kernels.reduction import row_sum


def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """z / sqrt(mean(z^2) + eps) * weight with z = x silu(gate), the mean over a group (Dao and Gu, Mamba-2, 2024).

    Args:
        x, gate: [tokens, d].
        weight: [d].
        groups: neighbouring channels form this many groups.

    Returns:
        Like ``x``; everything before the last rounding is fp32. The gradient of ``weight`` is the sum over the tokens
        by ``row_sum``.

    Raises:
        ValueError: the groups do not divide d.
    """
    if x.shape[1] % groups:
        raise ValueError(f"{groups} groups do not divide {x.shape[1]} channels")
    return _GatedGroupNorm.apply(x, gate, weight, groups, eps)


class _GatedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps):
        ctx.save_for_backward(x, gate, weight)
        ctx.settings = (groups, eps)
        gated = (silu(gate.float()) * x.float()).unflatten(1, (groups, -1))
        normed = (gated * mean_scale(gated, eps)).flatten(1)
        return normed.mul_(weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gate, weight = ctx.saved_tensors
        groups, eps = ctx.settings
        grad, wide, wide_gate = grad.float(), x.float(), gate.float()
        gated = (silu(wide_gate) * wide).unflatten(1, (groups, -1))
        scale = mean_scale(gated, eps)
        normed = gated * scale
        grad_weight = row_sum(grad * normed.flatten(1)).to(weight.dtype)
        weighted = (grad * weight.float()).unflatten(1, (groups, -1))
        inner = row_total(weighted * normed) / normed.shape[-1]
        grad_gated = (scale * (weighted - normed * inner)).flatten(1)
        # exp overflows for a gate below -88: the sigmoid is then 0 and so are both gradients.
        sigmoid = 1 / (1 + (-wide_gate).exp())
        grad_x = (grad_gated * wide_gate * sigmoid).to(x.dtype)
        grad_gate = (grad_gated * wide * sigmoid * (1 + wide_gate * (1 - sigmoid))).to(gate.dtype)
        return grad_x, grad_gate, grad_weight, None, None
