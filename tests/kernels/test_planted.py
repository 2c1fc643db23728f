"""A planted error: a product whose K is split over as many programs as the rows leave idle is caught, ours is not."""

import pytest
import torch
import triton
import triton.language as tl

from megatron_rlzero.kernels import backend, gpu
from megatron_rlzero.kernels.product.triton import product
from megatron_rlzero.kernels.tiles import Tile
from tests.kernels.checks import DTYPES, FP32, dependent_rows, error, tolerance

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="the kernel is interpreted: TRITON_INTERPRET=1")

#: programs that a device is said to have room for: up to 16 rows, one tile, leave it four splits, 50 rows one
ROOM = 4
#: several blocks of K in a split: sums of single blocks, added in order, would be those of the whole
TILE = Tile(m=16, n=32, k=16)


@triton.jit
def _split(
    a, b, parts, m, n, k, splits, a_row, a_column, b_row, b_column,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program: tile of rows, tile of columns, split; parts: fp32 [splits, m, n]."""
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    split, inner = tl.program_id(2), tl.arange(0, K)
    each = tl.cdiv(tl.cdiv(k, K), splits) * K
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(split * each, tl.minimum(split * each + each, k), K):
        at = start + inner
        in_a, in_b = (row[:, None] < m) & (at[None, :] < k), (at[:, None] < k) & (column[None, :] < n)
        x = tl.load(a + row[:, None] * a_row + at[None, :] * a_column, mask=in_a, other=0.0)
        y = tl.load(b + at[:, None] * b_row + column[None, :] * b_column, mask=in_b, other=0.0)
        total = gpu.dot(x, y, total)
    to = parts + (split * m + row[:, None]) * n + column[None, :]
    tl.store(to, total, mask=(row[:, None] < m) & (column[None, :] < n))


def split_product(a, b, splits=None):
    """fp32 a b; without ``splits`` there are as many as fill ROOM, as libraries choose them where rows are few."""
    (m, k), n = a.shape, b.shape[1]
    tiles = triton.cdiv(m, TILE.m), triton.cdiv(n, TILE.n)
    splits = splits or max(ROOM // (tiles[0] * tiles[1]), 1)
    parts = torch.empty(splits, m, n)
    _split[(*tiles, splits)](a, b, parts, m, n, k, splits, *a.stride(), *b.stride(), M=TILE.m, N=TILE.n, K=TILE.k)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def ours(a, b):
    return product(a[None], b[None], FP32)[0]


@pytest.fixture(params=DTYPES)
def matrices(request):
    return torch.randn(50, 128).to(request.param), torch.randn(128, 20).to(request.param)


def test_splits_chosen_from_the_rows_are_caught(matrices):
    a, b = matrices
    found = dependent_rows(lambda x: split_product(x, b), a)
    assert {"first 7 rows, 1 threads", "first 17 rows, 1 threads", "row 0 alone, 1 threads"} <= set(found)
    # as many rows with other numbers have as many splits: only calls of fewer rows show it
    assert not any("changed" in where for where in found)


def test_the_real_product_passes(matrices):
    a, b = matrices
    assert dependent_rows(lambda x: ours(x, b), a) == []


def test_it_is_the_choice_that_is_caught_and_not_the_split(matrices):
    a, b = matrices
    assert dependent_rows(lambda x: split_product(x, b, 4), a) == []
    assert not torch.equal(split_product(a, b, 4), split_product(a, b, 1))


def test_values_alone_do_not_show_it(matrices):
    a, b = matrices
    for rows in (1, 17, 50):
        assert error(split_product(a[:rows], b), a[:rows].double() @ b.double()) < tolerance(FP32)
