"""The scan in Triton: one kernel for packed documents, prefill, chunks and decode, which walks chunks in a fixed order.

A program has some channels of one head of one sequence. It takes the chunks of tiles.CHUNK tokens from the one that
holds the first new token on: old rows from the cache, new ones from the inputs. Where a sum begins and how it goes on
is the same for every row of a tile, whatever the other rows hold. The state lies in memory, from where slices of N are
multiplied, and moves over whole chunks only.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.mamba import cached
from megatron_rlzero.kernels.mamba.cached import Cache
from megatron_rlzero.kernels.segments import bounds_of

FAINT = tl.constexpr(tiles.FAINT)
#: Sums of A dt are counted in these units, so that they are exact and have no order; a single one is cut at 2^17.
UNITS = tl.constexpr(2.0**40)
MOST = tl.constexpr(2.0**57)
#: below every difference of such sums
VOID = tl.constexpr(-(2**62))


@triton.jit
def time_steps(raw, bias, least, most):
    """softplus(raw + bias) within the limits: max(v, 0) + log(1 + u) with u = exp(-|v|).

    With s = u / (2 + u) <= 1/3, log(1 + u) is 2 s times the series of s^2, of which nine terms count. NaN stays.
    """
    v = raw.to(tl.float32) + bias
    u = tl.exp(-tl.abs(v))
    s = tl.div_rn(u, 2.0 + u)
    square, series = s * s, tl.full(v.shape, 1.0 / 17, tl.float32)
    for i in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * i)
    v = tl.where(v < 0.0, 0.0, v) + 2.0 * s * series
    v = tl.where(v < least, least, v)
    return tl.where(v > most, most, v)


@triton.jit
def logs(A, steps):
    """int64 [tokens]: A dt summed up to each token, in UNITS, each product cut to them."""
    products = A.to(tl.float64) * steps.to(tl.float64) * UNITS
    return tl.cumsum(tl.minimum(tl.maximum(products, -MOST), MOST).to(tl.int64), 0)


@triton.jit
def last_of(log, Q: tl.constexpr):
    return tl.max(tl.where(tl.arange(0, Q) == Q - 1, log, VOID), axis=0)


@triton.jit
def decay(log):
    """exp of a difference of such sums, zero where it is not above FAINT."""
    e = tl.exp(log.to(tl.float32) * (1.0 / UNITS))
    return tl.where(e > FAINT, e, 0.0)


@triton.jit
def between(log, Q: tl.constexpr):
    """exp(L_t - L_s), [t, s]; 0 for s > t, set before the exponential, which might overflow there."""
    t = tl.arange(0, Q)
    return decay(tl.where(t[:, None] >= t[None, :], log[:, None] - log[None, :], VOID))


@triton.jit
def _scan(
    x, dt, A, B, C, D, bias, out, bounds, positions, slots, state, old_x, old_dt, old_B, least, most,
    x_row, x_head, dt_row, B_row, B_group, C_row, C_group, state_block, x_block, dt_block, B_block,
    H, J, P, N, Q: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(1), tl.program_id(0) % H
    p = tl.program_id(0) // H * M + tl.arange(0, M)
    begin, end, position = tl.load(bounds + sequence), tl.load(bounds + sequence + 1), tl.load(positions + sequence)
    past, slot, group = position % Q, tl.load(slots + sequence), head // J
    t, k = tl.arange(0, Q), tl.arange(0, K)
    x += head * x_head + p[None, :]
    B += group * B_group
    C += group * C_group
    old_x += slot * x_block + (t * H + head)[:, None] * P + p[None, :]
    old_B += slot * B_block + (t * (H // J) + group)[:, None] * N
    state += slot * state_block + (head * P + p)[:, None] * N
    rate, skip, shift = tl.load(A + head), tl.load(D + head), tl.load(bias + head)
    # a sequence without new tokens has no chunks; `first` is the token that row 0 is, or would be
    for first in range(begin - past, tl.where(begin < end, end, begin - past), Q):
        row = first + t
        old, real = row < begin, row < end
        new, at = real & (row >= begin), row.to(tl.int64)[:, None]
        raw = tl.load(dt + row.to(tl.int64) * dt_row + head, mask=new, other=0.0)
        kept = tl.load(old_dt + slot * dt_block + t * H + head, mask=old & real, other=0.0)
        steps = tl.where(new, time_steps(raw, shift, least, most), kept)
        log = logs(rate, steps)
        last = last_of(log, Q)
        rows = tl.load(tl.where(old[:, None], old_x, x + at * x_row), mask=real[:, None] & (p < P)[None, :], other=0.0)
        rows = rows.to(tl.float32)
        weighted = tl.trans((decay(last - log) * steps)[:, None] * rows)
        scores, read = tl.zeros((Q, Q), dtype=tl.float32), tl.zeros((Q, M), dtype=tl.float32)
        over, whole, known = decay(last), first + Q <= end, (first > begin) | (position >= Q)
        for n in range(0, N, K):
            column = (n + k)[None, :]
            b = tl.where(old[:, None], old_B, B + at * B_row) + column
            b = tl.load(b, mask=real[:, None] & (column < N), other=0.0)
            c = tl.load(C + at * C_row + column, mask=new[:, None] & (column < N), other=0.0)
            inside = (p < P)[:, None] & (column < N)
            h = tl.load(state + column, mask=inside & known, other=0.0)
            scores = gpu.dot(c, tl.trans(b), scores)
            read = gpu.dot(c.to(tl.float32), tl.trans(h), read)
            if whole:
                moved = gpu.dot(weighted, b.to(tl.float32), h * over)
                tl.store(state + column, moved, mask=inside)
        mixed = scores * between(log, Q) * steps[None, :]
        y = gpu.dot(mixed, rows, read * decay(log)[:, None]) + skip * rows
        to = out + (at * H + head) * P + p[None, :]
        tl.store(to, gpu.rounded(y, out.dtype.element_ty), mask=new[:, None] & (p < P)[None, :])
        tl.debug_barrier()  # other threads load what these have stored


@triton.jit
def _remember(
    x, dt, B, bias, bounds, positions, slots, old_x, old_dt, old_B, least, most,
    x_row, x_head, dt_row, B_row, B_group, x_block, dt_block, B_block,
    H, J, P, N, Q: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Leaves the new rows of a chunk that is not whole in the cache, after all heads have read the old ones."""
    sequence, head = tl.program_id(1), tl.program_id(0)
    begin, end, position = tl.load(bounds + sequence), tl.load(bounds + sequence + 1), tl.load(positions + sequence)
    slot, group, count = tl.load(slots + sequence), head // J, (position % Q + end - begin) % Q
    t = tl.arange(0, Q)
    row = end - count + t
    new, at = (row >= begin) & (row < end), row.to(tl.int64)[:, None]
    raw = tl.load(dt + row.to(tl.int64) * dt_row + head, mask=new, other=0.0)
    steps = time_steps(raw, tl.load(bias + head), least, most)
    tl.store(old_dt + slot * dt_block + t * H + head, steps, mask=new)
    for first in range(0, P, M):
        p = (first + tl.arange(0, M))[None, :]
        rows = tl.load(x + at * x_row + head * x_head + p, mask=new[:, None] & (p < P), other=0.0)
        tl.store(old_x + slot * x_block + (t * H + head)[:, None] * P + p, rows, mask=new[:, None] & (p < P))
    if head % J == 0:
        for first in range(0, N, K):
            n = (first + tl.arange(0, K))[None, :]
            rows = tl.load(B + at * B_row + group * B_group + n, mask=new[:, None] & (n < N), other=0.0)
            to = old_B + slot * B_block + (t * (H // J) + group)[:, None] * N + n
            tl.store(to, rows, mask=new[:, None] & (n < N))


def scan(
    inputs: Sequence[Tensor], lengths: list[int], limit: tuple[float, float], initial: Tensor | None, save: bool
) -> tuple[Tensor, list[Tensor]]:
    """See ``reference.scan``; nothing is saved. The states take documents * H * P * N numbers of fp32 meanwhile.

    Documents are sequences with a cache of which only the state is used: that of one whole chunk if there are initial
    states, else of none.
    """
    inputs = [side_by_side(t) for t in inputs]
    x, B = inputs[0], inputs[3]
    count, device = len(lengths), x.device
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    expected = cached.blocks(H, P, G, N, x.dtype)
    memory = [
        torch.empty(1 if i else count, *shape, dtype=dtype, device=device)
        for i, (shape, _, dtype) in enumerate(expected)
    ]
    if initial is not None:
        memory[0].copy_(initial)
    position = 0 if initial is None else tiles.CHUNK
    positions = torch.full((count,), position, dtype=torch.int32, device=device)
    cache = Cache(*memory, torch.arange(count, device=device))
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    _run(inputs, bounds_of(lengths, device), positions, cache, limit, out)
    return out, []


def scan_cached(
    inputs: Sequence[Tensor], bounds: Tensor, positions: Tensor, cache: Cache, limit: tuple[float, float]
) -> Tensor:
    """See ``dispatch.scan_cached_at``; launches depend on shapes alone, and nothing waits for the device."""
    x, dt, _, B, _, _, bias = inputs = [side_by_side(t) for t in inputs]
    cached.check(cache, x, B)
    out = x.new_zeros(x.shape)
    grid, constants = _run(inputs, bounds, positions, cache, limit, out)
    if out.numel() and grid[1]:
        _remember[x.shape[1], grid[1]](
            x, dt, B, bias, bounds, positions, cache.slots, cache.x, cache.dt, cache.B, *limit,
            *x.stride()[:2], dt.stride(0), *B.stride()[:2], *(t.stride(0) for t in cache[1:4]), **constants,
        )  # fmt: skip
    return out


def _run(
    inputs: Sequence[Tensor],
    bounds: Tensor,
    positions: Tensor,
    cache: Cache,
    limit: tuple[float, float],
    out: Tensor,
) -> tuple[tuple[int, int], dict[str, int | bool]]:
    """Writes y; returns grid and constants."""
    x, dt, A, B, C, D, bias = inputs
    if not x.dtype == B.dtype == C.dtype:
        raise TypeError(f"x {x.dtype}, B {B.dtype} and C {C.dtype}; on a GPU the scan takes one dtype")
    constants = sizes(x, B)
    grid = (x.shape[1] * triton.cdiv(x.shape[2], constants["M"]), len(cache.slots))
    if out.numel() and grid[1]:
        _scan[grid](
            x, dt, A, B, C, D, bias, out, bounds, positions, cache.slots, *cache[:4], *limit,
            *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *(t.stride(0) for t in cache[:4]),
            **constants,
        )  # fmt: skip
    return grid, constants


def sizes(x: Tensor, B: Tensor) -> dict[str, int | bool]:
    """Constants of a launch: they follow from the model's sizes and the tile alone."""
    (H, P), (G, N), tile = x.shape[1:], B.shape[1:], tiles.gpu(x.device).scan
    m, n = (max(min(most, triton.next_power_of_2(size)), 16) for most, size in ((tile.m, P), (tile.n, N)))
    return {"H": H, "J": H // G, "P": P, "N": N, "Q": tiles.CHUNK, "M": m, "K": n, **gpu.options(tile)}


def side_by_side(x: Tensor) -> Tensor:
    """``x`` with the numbers of its last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
