"""Batched product of strided matrices: tiles of fixed size, the contracted dimension from its first block to its last.

A tile of the result is computed by one program, whatever the shape of the whole; the programs are persistent and take
tiles in turn. Nothing is split over the contracted dimension, nothing is tuned, and no shape has code of its own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles


@triton.jit(do_not_specialize=["batch", "m_units", "k_units"])
def _product(
    a, b, bias, out, batch, m_units, n, k_units,
    a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row,
    M_UNIT: tl.constexpr, K_UNIT: tl.constexpr, BIASED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m, k = m_units * M_UNIT, k_units * K_UNIT
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    for tile in range(tl.program_id(0), batch * rows * columns, tl.num_programs(0)):
        # neighbours take the same columns of b, GROUP rows of tiles at a time, so that caches hold them
        index, at = tile // (rows * columns), tile % (rows * columns)
        first = at // (GROUP * columns) * GROUP
        height = tl.minimum(rows - first, GROUP)
        above, left = (first + at % (GROUP * columns) % height) * M, at % (GROUP * columns) // height * N
        i, j = tl.arange(0, M), tl.arange(0, N)
        inner = tl.arange(0, K)
        # 64 bits to the corner of a tile, 32 within it
        a_at = a + index.to(tl.int64) * a_batch + above.to(tl.int64) * a_row
        b_at = b + index.to(tl.int64) * b_batch + left.to(tl.int64) * b_column
        of_a, of_b = i[:, None] * a_row + inner[None, :] * a_column, inner[:, None] * b_row + j[None, :] * b_column
        total = tl.zeros((M, N), dtype=tl.float32)
        for start in range(0, k, K):
            x = tl.load(a_at + of_a, mask=(i[:, None] < m - above) & (inner[None, :] < k - start), other=0.0)
            y = tl.load(b_at + of_b, mask=(inner[:, None] < k - start) & (j[None, :] < n - left), other=0.0)
            total = gpu.dot(x, y, total)
            a_at += tl.cast(a_column, tl.int64) * K
            b_at += tl.cast(b_row, tl.int64) * K
        inside = (i[:, None] < m - above) & (j[None, :] < n - left)
        if BIASED:
            total += tl.load(bias + left + j, mask=j < n - left, other=0.0).to(tl.float32)[None, :]
        at_out = out + index.to(tl.int64) * out_batch + above.to(tl.int64) * out_row + left
        value = gpu.rounded(total, out.dtype.element_ty)
        tl.store(at_out + i[:, None] * out_row + j[None, :], value, mask=inside)


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
    tile = tiles.gpu(a.device).product_of(a.dtype)
    count = batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    # Features come in units of 16 where they lie side by side, which loads them together; tokens are never counted so.
    m_unit, k_unit = (16 if x == 1 and size % 16 == 0 else 1 for x, size in ((a.stride(1), m), (a.stride(2), k)))
    _product[(gpu.programs(count, a.device),)](
        a, b, None if bias is None else bias.contiguous(), out, batch, m // m_unit, n, k // k_unit,
        *a.stride(), *b.stride(), *out.stride()[:2],
        M_UNIT=m_unit, K_UNIT=k_unit, BIASED=bias is not None,
        M=tile.m, N=tile.n, K=tile.k, GROUP=8, **gpu.options(tile),
    )  # fmt: skip
    return out
