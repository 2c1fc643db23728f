"""Torch's form of sums over slices: elementwise adds of neighbours, products of slices as one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.product.reference import batched
from megatron_rlzero.kernels.tiles import pad_rows


def tree(x: Tensor) -> Tensor:
    """See ``dispatch.tree``, for dim 0."""
    if missing := (1 << (x.shape[0] - 1).bit_length()) - x.shape[0]:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def row_sum(x: Tensor) -> Tensor:
    """See ``dispatch.row_sum``; in tiles first, so that little is padded."""
    return tree(tree(pad_rows(x).unflatten(0, (-1, tiles.ROWS)).float().movedim(1, 0)))


def slice_products(x: Sequence[Tensor], weight: Sequence[Tensor]) -> Tensor:
    """Products of slices, fp32 [slices, rows, m].

    Args:
        x: [rows, slices, size] of each block.
        weight: [slices, size, m] of each block.
    """
    rows, slices = x[0].shape[:2]
    parts = [pad_rows(part).float().transpose(0, 1) for part in x]
    weights = [part.float() for part in weight]
    if missing := -sum(part.shape[2] for part in x) % tiles.WIDTH:
        parts.append(parts[0].new_zeros(slices, parts[0].shape[1], missing))
        weights.append(weights[0].new_zeros(slices, missing, weights[0].shape[2]))
    a, b = (p[0] if len(p) == 1 else torch.cat(p, d) for p, d in ((parts, 2), (weights, 1)))
    return batched(a, b)[:, :rows]
