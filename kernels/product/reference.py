"""Batched product on CPUs: no matrix of it is cut among threads, into columns so few that a library has other code.

The library gives its threads whole matrices, but for a batch of one, and where torch hands it the matrices one by one,
which depends on their strides.
"""

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles


def batched(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.bmm``."""
    if b.shape[2] >= tiles.columns():
        return torch.bmm(a, b, out=out)
    if len(a) > 1:
        return torch.bmm(_whole(a), _whole(b), out=out)
    product = torch.bmm(_twice(a), _twice(b))[:1]
    return product if out is None else out.copy_(product)


def batched_add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total.baddbmm_``, of a contiguous ``total``."""
    if b.shape[2] >= tiles.columns():
        return total.baddbmm_(a, b)
    if len(a) > 1:
        return total.baddbmm_(_whole(a), _whole(b))
    return total.copy_(torch.baddbmm(_twice(total), _twice(a), _twice(b))[:1])


def _whole(x: Tensor) -> Tensor:
    """Matrices whose rows, or columns, lie one behind the other: torch hands these to the library as one batch."""
    rows = x.stride(2) == 1 and x.stride(1) >= x.shape[2]
    columns = x.stride(1) == 1 and x.stride(2) >= x.shape[1]
    return x if rows or columns else x.contiguous()


def _twice(x: Tensor) -> Tensor:
    return _whole(x).expand(2, -1, -1)
