"""Experts in Triton: tiles of rows of one expert each, found on the device, and the combination of their outputs.

The products are those of kernels/product: the same tiles, the contracted dimension from its first block to its last.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.activation.triton import silu_and_mul, squared_relu
from megatron_rlzero.kernels.segments import bounds_of, most_tiles, segment_of, tile_bounds


@triton.jit(do_not_specialize=["every"])
def _rows_times_weights(
    x, weights, out, bounds, tile_bounds, order, experts, n, k, every, x_row, w_row, w_column, out_row,
    GATHERED: tl.constexpr, SCATTERED: tl.constexpr, ALIGNED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < tl.load(tile_bounds + experts):
        expert = segment_of(tile_bounds, experts, tile)
        row = tl.load(bounds + expert) + (tile - tl.load(tile_bounds + expert)) * M + tl.arange(0, M)
        real = row < tl.load(bounds + expert + 1)
        left, column, inner = tl.program_id(1) * N, tl.arange(0, N), tl.arange(0, K)
        pair = tl.load(order + row, mask=real, other=0) if GATHERED or SCATTERED else row
        source = pair // every if GATHERED else row
        weight = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
        if ALIGNED:
            weight = tl.multiple_of(weight, 16)  # else the compiler reads each number by itself
        x_at = x + source.to(tl.int64)[:, None] * x_row + inner[None, :]
        w_at = weight + left.to(tl.int64) * w_row
        of_w = inner[:, None] * w_column + column[None, :] * w_row
        total = tl.zeros((M, N), dtype=tl.float32)
        for start in range(0, k, K):
            a = tl.load(x_at, mask=real[:, None] & (inner[None, :] < k - start), other=0.0)
            b = tl.load(w_at + of_w, mask=(inner[:, None] < k - start) & (column[None, :] < n - left), other=0.0)
            total = gpu.dot(a, b, total)
            x_at += K
            w_at += tl.cast(w_column, tl.int64) * K
        target = pair if SCATTERED else row
        at = out + target.to(tl.int64)[:, None] * out_row + left + column[None, :]
        tl.store(at, gpu.rounded(total, out.dtype.element_ty), mask=real[:, None] & (column[None, :] < n - left))


@triton.jit
def _weight_gradients(
    grad, x, out, bounds, n, k, grad_row, x_row, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(2)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    begin, end, inner = tl.load(bounds + expert), tl.load(bounds + expert + 1), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(begin, end, K):
        token = start + inner
        real = token < end
        a = grad + token.to(tl.int64)[None, :] * grad_row + row[:, None]
        b = x + token.to(tl.int64)[:, None] * x_row + column[None, :]
        a = tl.load(a, mask=real[None, :] & (row[:, None] < n), other=0.0)
        b = tl.load(b, mask=real[:, None] & (column[None, :] < k), other=0.0)
        total = gpu.dot(a, b, total)
    at = out + (expert.to(tl.int64) * n + row[:, None]) * k + column[None, :]
    tl.store(at, gpu.rounded(total, out.dtype.element_ty), mask=(row[:, None] < n) & (column[None, :] < k))


@triton.jit
def _combine(outputs, probabilities, out, slots, width, SIZE: tl.constexpr):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for slot in range(slots):
        y = tl.load(outputs + (token * slots + slot) * width + at, mask=at < width, other=0.0).to(tl.float32)
        weighted = y * tl.load(probabilities + token * slots + slot)
        total = weighted if slot == 0 else total + weighted
    tl.store(out + token * width + at, gpu.rounded(total, out.dtype.element_ty), mask=at < width)


@triton.jit
def _combine_gradient(outputs, probabilities, grad, to_outputs, to_probabilities, slots, width, SIZE: tl.constexpr):
    pair, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    p, total = tl.load(probabilities + pair), tl.zeros((SIZE,), dtype=tl.float32)
    for start in range(0, width, SIZE):
        inside = start + at < width
        y = tl.load(outputs + pair * width + start + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + pair // slots * width + start + at, mask=inside, other=0.0).to(tl.float32)
        total += g * y
        tl.store(to_outputs + pair * width + start + at, gpu.rounded(g * p, to_outputs.dtype.element_ty), mask=inside)
    tl.store(to_probabilities + pair, tl.sum(total, axis=0))


def grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """See ``dispatch.grouped_linear``."""
    x, weights = gpu.rows(x), [w.contiguous() for w in weights]
    out = x.new_empty(len(x), weights[0].shape[0])
    _product(x, _addresses(weights), weights[0], bounds_of(rows, x.device), out)
    return out


def grouped_gradients(
    x: Tensor, weights: Sequence[Tensor], rows: Sequence[int], grad: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Gradients of x and of every weight. A weight's is added up over its expert's rows, from the first block on."""
    x, grad, weights = gpu.rows(x), gpu.rows(grad), [w.contiguous() for w in weights]
    to_x, bounds = torch.empty(x.shape, dtype=x.dtype, device=x.device), bounds_of(rows, x.device)
    _product(grad, _addresses(weights), weights[0].T, bounds, to_x)
    (n, k), tile = weights[0].shape, tiles.gpu(x.device).product_of(x.dtype)
    to_weights = x.new_empty(len(weights), n, k)
    if to_weights.numel():
        grid = (triton.cdiv(n, tile.m), triton.cdiv(k, tile.n), len(weights))
        sizes = {"M": tile.m, "N": tile.n, "K": tile.k}
        _weight_gradients[grid](
            grad, x, to_weights, bounds, n, k, grad.stride(0), x.stride(0), **sizes, **gpu.options(tile)
        )
    return to_x, to_weights.unbind()


def mlp(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, gated: bool) -> Tensor:
    """See ``dispatch.mlp``."""
    x, w13, w2, k = gpu.rows(x), w13.contiguous(), w2.contiguous(), experts.shape[1]
    # Experts that are elsewhere come last, behind the last bound.
    number = torch.where(experts < 0, len(w13), experts).flatten()
    number, order = torch.sort(number, stable=True)
    bounds = torch.searchsorted(number, torch.arange(len(w13) + 1, device=x.device), out_int32=True)
    hidden = x.new_empty(len(order), w13.shape[1])
    _product(x, _addresses(w13), w13[0], bounds, hidden, order, gathered=k)
    hidden = silu_and_mul(hidden) if gated else squared_relu(hidden)
    out = x.new_zeros(len(order), w2.shape[1])
    _product(hidden, _addresses(w2), w2[0], bounds, out, order, scattered=True)
    return out.view(*experts.shape, w2.shape[1])


def combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    """See ``dispatch.combine``."""
    outputs, probabilities = outputs.contiguous(), probabilities.contiguous()
    (tokens, slots, width), tile = outputs.shape, tiles.gpu(outputs.device).row
    out = outputs.new_empty(tokens, width)
    if out.numel():
        size = min(triton.next_power_of_2(width), 1024)
        grid = (tokens, triton.cdiv(width, size))
        _combine[grid](outputs, probabilities, out, slots, width, SIZE=size, **gpu.options(tile))
    return out


def combine_gradients(outputs: Tensor, probabilities: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both. A probability's is a sum over the width, in columns of a fixed number first."""
    outputs, probabilities, grad = outputs.contiguous(), probabilities.contiguous(), grad.contiguous()
    (tokens, slots, width), tile = outputs.shape, tiles.gpu(outputs.device).row
    to_outputs, to_probabilities = torch.empty_like(outputs), torch.empty_like(probabilities)
    if outputs.numel():
        size = min(triton.next_power_of_2(width), 1024)
        results = (to_outputs, to_probabilities)
        _combine_gradient[(tokens * slots,)](
            outputs, probabilities, grad, *results, slots, width, SIZE=size, **gpu.options(tile)
        )
    return to_outputs, to_probabilities


def _addresses(weights: Sequence[Tensor] | Tensor) -> tuple[Tensor, bool]:
    """int64 [experts], where each weight begins in memory, and whether all of them do at multiples of 16 bytes.

    Those of one tensor are computed on the device.
    """
    if isinstance(weights, Tensor):
        first, step = weights.data_ptr(), weights.stride(0) * weights.element_size()
        return torch.arange(len(weights), device=weights.device) * step + first, not (first % 16 or step % 16)
    known = [w.data_ptr() for w in weights]
    return torch.tensor(known).to(weights[0].device, non_blocking=True), not any(address % 16 for address in known)


def _product(
    x: Tensor,
    where: tuple[Tensor, bool],
    weight: Tensor,
    bounds: Tensor,
    out: Tensor,
    order: Tensor | None = None,
    gathered: int = 0,
    scattered: bool = False,
) -> None:
    """Fills ``out`` with rows of x times their expert's weight, transposed.

    Args:
        where: the weights' ``_addresses``.
        weight: [n, k], one whose strides are those of all.
        bounds: int32 [experts + 1], rows of each expert.
        order: int64 [rows]: row i is the one of the pair ``order[i]`` of token and slot.
        gathered: slots per token if x has a row per token; 0 if it has one per row.
        scattered: whether row i of the result goes to ``out[order[i]]``.
    """
    if not out.numel():
        return
    (addresses, aligned), (n, k), tile = where, weight.shape, tiles.gpu(x.device).product_of(x.dtype)
    rows, experts = len(out), len(addresses)
    aligned &= x.element_size() == 2  # four bytes at a time are no loss, and the registers fewer
    grid = (most_tiles(rows, experts, tile.m), triton.cdiv(n, tile.n))
    sizes = {"M": tile.m, "N": tile.n, "K": tile.k}
    _rows_times_weights[grid](
        x, addresses, out, bounds, tile_bounds(bounds, tile.m), bounds if order is None else order,
        experts, n, k, max(gathered, 1), x.stride(0), *weight.stride(), out.stride(0),
        GATHERED=gathered > 0, SCATTERED=scattered, ALIGNED=aligned, **sizes, **gpu.options(tile),
    )  # fmt: skip
