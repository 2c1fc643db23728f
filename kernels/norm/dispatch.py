"""Norms as learner and engine call them, in the form of the device.

Weight gradients do not depend on who holds which rows and heads.
Both forms see rows of groups: heads that share a weight, or groups of channels of which each has its own part of it.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.norm import reference
from megatron_rlzero.kernels.reduction import gather, tree


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rows: ProcessGroup | None = None, heads: ProcessGroup | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).

    Args:
        x: [tokens, ..., H]. Dimensions between the first and the last are heads that share the weight.
        weight: [H].
        rows: ranks over which the tokens are split (sequence parallelism), a multiple of tiles.ROWS on each.
        heads: ranks over which the heads are split (tensor parallelism).

    Returns:
        Like ``x``; everything before the last rounding is fp32.

    The gradient of ``weight`` is the whole one on every rank: the tokens' contributions are added in chunks of
    tiles.ROWS by a tree, the chunks by a tree, then the heads by a tree.
    """
    return _RMSNorm.apply(x, weight, eps, rows, heads)


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


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.norm import triton

    return triton


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, rows, heads):
        ctx.groups = (rows, heads)
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        y, scale = _form(x).norm(flat, None, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        rows, heads = ctx.groups
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        grad_x, _, chunks = _form(x).gradients(flat, None, weight, scale, grad.reshape(flat.shape))
        per_head = gather(tree(gather(chunks, rows)), heads)
        return grad_x.view(x.shape), tree(per_head).to(weight.dtype), None, None, None


class _GatedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, groups, eps):
        ctx.groups = groups
        y, scale = _form(x).norm(x.unflatten(1, (groups, -1)), gate.unflatten(1, (groups, -1)), weight, eps)
        ctx.save_for_backward(x, gate, weight, scale)
        return y.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *inputs, weight, scale = ctx.saved_tensors
        x, gate, grad = (t.unflatten(1, (ctx.groups, -1)) for t in (*inputs, grad))
        grad_x, grad_gate, chunks = _form(x).gradients(x, gate, weight, scale, grad)
        return grad_x.flatten(1), grad_gate.flatten(1), tree(chunks).flatten().to(weight.dtype), None, None
