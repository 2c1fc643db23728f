"""RMSNorm in fp32 with one rounding at the end, and a weight gradient that does not depend on who holds which rows."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels import tiles
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
    tiles.ROWS, the chunks by a tree, then the heads by a tree.
    """
    return _RMSNorm.apply(x, weight, eps, rows, heads)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, rows, heads):
        ctx.groups = (rows, heads)
        scale = mean_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        rows, heads = ctx.groups
        grad, normed = grad.float(), x.float() * scale
        weighted = grad * weight.float()
        inner = row_total(weighted * normed) / x.shape[-1]
        grad_x = (scale * (weighted - normed * inner)).to(x.dtype)
        parts = tiles.pad_rows((grad * normed).reshape(x.shape[0], -1, x.shape[-1]))
        chunks = gather(tree(parts.unflatten(0, (-1, tiles.ROWS)), dim=1), rows)
        per_head = gather(tree(chunks), heads)
        return grad_x, tree(per_head).to(weight.dtype), None, None, None


def mean_scale(x: Tensor, eps: float) -> Tensor:
    """fp32 [..., 1]: 1 / sqrt(mean(x^2) + eps), from a division and a root, which every library rounds correctly."""
    return row_total(x.float().square()).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()


def row_total(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, on whole row tiles."""
    rows = x.reshape(-1, x.shape[-1])
    return tiles.pad_rows(rows).sum(-1)[: rows.shape[0]].view(*x.shape[:-1], 1)
