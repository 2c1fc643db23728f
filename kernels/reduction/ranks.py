"""Sums over ranks by the upper levels of one binary tree, so that they do not depend on the parallel size.

A contraction is cut into a fixed number of slices. With n ranks each holds slices / n neighbouring ones and adds them
up to the root of its subtree; the roots are exchanged and added by the levels above. Everything is fp32 until the
caller rounds the tree's root, once. Ranks send each other rows, never all partial sums to all.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels.reduction.dispatch import tree
from megatron_rlzero.kernels.tiles import pad_rows


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
