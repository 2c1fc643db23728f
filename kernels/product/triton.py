"""Batched product of strided matrices: tiles of fixed size, the contracted dimension from its first block to its last.

A tile of the result is computed by one program, whatever the shape of the whole; the programs are persistent and take
tiles in turn. Nothing is split over the contracted dimension, nothing is tuned, and no shape has code of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles


@triton.jit(do_not_specialize=["batch", "m", "n", "k"])
def _product(
    a, b, bias, out, batch, m, n, k,
    a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row,
    BIASED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    for tile in range(tl.program_id(0), batch * rows * columns, tl.num_programs(0)):
        # neighbours take the same columns of b, GROUP rows of tiles at a time, so that caches hold them
        index, at = tile // (rows * columns), tile % (rows * columns)
        first = at // (GROUP * columns) * GROUP
        height = tl.minimum(rows - first, GROUP)
        i = (first + at % (GROUP * columns) % height) * M + tl.arange(0, M)
        j = at % (GROUP * columns) // height * N + tl.arange(0, N)
        inner = tl.arange(0, K)
        a_at = (
            a + index.to(tl.int64) * a_batch + i.to(tl.int64)[:, None] * a_row + inner.to(tl.int64)[None, :] * a_column
        )
        b_at = (
            b + index.to(tl.int64) * b_batch + inner.to(tl.int64)[:, None] * b_row + j.to(tl.int64)[None, :] * b_column
        )
        total = tl.zeros((M, N), dtype=tl.float32)
        for start in range(0, k, K):
            x = tl.load(a_at, mask=(i[:, None] < m) & (inner[None, :] < k - start), other=0.0)
            y = tl.load(b_at, mask=(inner[:, None] < k - start) & (j[None, :] < n), other=0.0)
            total = gpu.dot(x, y, total)
            a_at += K * a_column
            b_at += K * b_row
        if BIASED:
            total += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
        at_out = out + index.to(tl.int64) * out_batch + i.to(tl.int64)[:, None] * out_row + j[None, :]
        value = gpu.rounded(total, out.dtype.element_ty)
        tl.store(at_out, value, mask=(i[:, None] < m) & (j[None, :] < n))


def product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a b (+ bias), accumulated in fp32 and rounded once to ``dtype``.

    Args:
        a: [batch, m, k], b: [batch, k, n], of one dtype, with any strides.
        bias: [n] or None.

    Returns:
        [batch, m, n].
    """
    (batch, m, k), n = a.shape, b.shape[2]
    if b.shape[:2] != (batch, k) or a.dtype != b.dtype:
        raise ValueError(f"product of {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
    out = torch.empty(batch, m, n, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    tile = tiles.gpu(a.device).product
    depth = tile.bytes // a.element_size()
    count = batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    _product[(gpu.programs(count, a.device),)](
        a, b, bias, out, batch, m, n, k,
        *a.stride(), *b.stride(), *out.stride()[:2],
        BIASED=bias is not None, M=tile.m, N=tile.n, K=depth, GROUP=8, **gpu.options(tile),
    )  # fmt: skip
    return out
