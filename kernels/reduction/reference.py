"""Sums over slices and over ranks by one binary tree of neighbours, so that they do not depend on the parallel size.

A contraction is cut into a fixed number of slices. With n ranks each holds slices / n neighbouring ones and adds them
up to the root of its subtree; the roots are exchanged and added by the levels above. Everything is fp32 until the
caller rounds the tree's root, once. Ranks send each other rows, never all partial sums to all.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.tiles import pad_rows


def tree(x: Tensor, dim: int = 0) -> Tensor:
    """Sum over ``dim`` by a binary tree of neighbours: (x0 + x1) + (x2 + x3) and so on, in the dtype of ``x``.

    The length is padded to a power of two with zeros.
    """
    x = x.movedim(dim, 0)
    if missing := (1 << (x.shape[0] - 1).bit_length()) - x.shape[0]:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def row_sum(x: Tensor) -> Tensor:
    """fp32 sum over the rows of ``x`` [n, m] by ``tree``, whatever m is; in tiles first, so that little is padded."""
    return tree(tree(pad_rows(x).unflatten(0, (-1, tiles.ROWS)).float(), dim=1))


def sliced_product(x: Tensor, weight: Tensor, slices: int, blocks: Sequence[int] = ()) -> Tensor:
    """x W over ``slices`` slices of the contracted dimension, added by ``tree``.

    Args:
        x: [rows, n].
        weight: [n, m].
        slices: how many slices this rank holds.
        blocks: sizes of blocks one after the other that make up ``n``, each of which is cut: a slice is the same part
            of every block. Without any, n is one block.

    Returns:
        fp32 [rows, m], not rounded to the dtype of ``x``.

    Raises:
        ValueError: a block does not divide into slices.
    """
    rows, n = x.shape
    blocks = list(blocks) or [n]
    if wrong := [size for size in blocks if size % slices]:
        raise ValueError(f"a contraction over {n} does not divide into {slices} slices: it has a block of {wrong[0]}")
    x = pad_rows(x).float()
    parts = [part.unflatten(1, (slices, -1)).transpose(0, 1) for part in x.split(blocks, 1)]
    weights = [part.unflatten(0, (slices, -1)) for part in weight.float().split(blocks)]
    if missing := -(n // slices) % tiles.WIDTH:
        parts.append(x.new_zeros(slices, len(x), missing))
        weights.append(weight.new_zeros(slices, missing, weight.shape[1], dtype=x.dtype))
    x, weight = (p[0] if len(p) == 1 else torch.cat(p, d) for p, d in ((parts, 2), (weights, 1)))
    return tree(torch.bmm(x, weight))[:rows]


def gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Rows of all ranks, in rank order: [n, ...] -> [ranks * n, ...]."""
    if group is None or dist.get_world_size(group) == 1:
        return x
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Adds the ranks' ``x`` [n, ...] by ``tree`` in rank order; each keeps its n / ranks rows."""
    if group is None or dist.get_world_size(group) == 1:
        return x
    ranks = dist.get_world_size(group)
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=group)
    return tree(parts.unflatten(0, (ranks, -1)))


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Adds the ranks' ``x`` [n, ...] by ``tree`` in rank order, on every rank."""
    if group is None or dist.get_world_size(group) == 1:
        return x
    return gather(reduce_scatter(pad_rows(x, dist.get_world_size(group)), group), group)[: x.shape[0]]
