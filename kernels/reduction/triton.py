"""Sums over slices in Triton: several levels of the tree of neighbours in one launch, products on fixed tiles."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.product.triton import product


@triton.jit
def neighbours(x, LEVELS: tl.constexpr):
    """[2^LEVELS, columns] -> [columns], added as neighbours, then neighbours of the sums, and so on."""
    for _ in tl.static_range(LEVELS):
        even, odd = tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))
        x = even + odd
    return tl.reshape(x, (x.shape[1],))


@triton.jit(do_not_specialize=["n"])
def _tree(x, out, n, m, x_row, out_row, LEVELS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.program_id(1) * (1 << LEVELS) + tl.arange(0, 1 << LEVELS)
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = x + rows.to(tl.int64)[:, None] * x_row + columns[None, :]
    values = tl.load(at, mask=(rows[:, None] < n) & (columns[None, :] < m), other=0.0).to(tl.float32)
    total = gpu.rounded(neighbours(values, LEVELS), out.dtype.element_ty)
    tl.store(out + tl.program_id(1).to(tl.int64) * out_row + columns, total, mask=columns < m)


def tree(x: Tensor) -> Tensor:
    """See ``dispatch.tree``, for dim 0."""
    return _added(x.reshape(x.shape[0], -1), x.dtype).view(x.shape[1:])


def row_sum(x: Tensor) -> Tensor:
    """See ``dispatch.row_sum``."""
    return _added(x, torch.float32)


def _added(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of [n, m] by the tree, in ``dtype``."""
    x, tile = gpu.rows(x), tiles.gpu(x.device).tree
    while x.shape[0] > 1:
        levels = min((x.shape[0] - 1).bit_length(), tile.m.bit_length() - 1)
        out = x.new_empty(triton.cdiv(x.shape[0], 1 << levels), x.shape[1], dtype=dtype)
        if out.numel():
            grid = (triton.cdiv(x.shape[1], tile.n), out.shape[0])
            sizes = (*x.shape, x.stride(0), out.stride(0))
            _tree[grid](x, out, *sizes, LEVELS=levels, COLUMNS=tile.n, **gpu.options(tile))
        x = out
    return x[0].to(dtype) if len(x) else x.new_zeros(x.shape[1], dtype=dtype)


def slice_products(x: Sequence[Tensor], weight: Sequence[Tensor]) -> Tensor:
    """See ``reference.slice_products``; a slice's blocks lie one after the other in its sum."""
    a = x[0] if len(x) == 1 else torch.cat(list(x), 2)
    b = weight[0] if len(weight) == 1 else torch.cat(list(weight), 1)
    return product(a.transpose(0, 1), b, torch.float32)
