"""Causal convolution in Triton: programs of fixed tiles of tokens and channels, whose rows look up where they belong.

A token of a document, of a chunk of one, or a single new one is a row of the same kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.activation.triton import sigmoid
from megatron_rlzero.kernels.reduction import row_sum
from megatron_rlzero.kernels.reduction.triton import neighbours
from megatron_rlzero.kernels.segments import bounds_of


@triton.jit
def _sequences(bounds, count, row):
    """Of each row the last sequence that begins at it or before it; see ``segments.segment_of``."""
    found = tl.zeros_like(row)
    left = count
    while left > 1:
        half = left // 2
        found = tl.where(tl.load(bounds + found + half) <= row, found + half, found)
        left -= half
    return found


@triton.jit
def _tap(x, past, row, start, known, inside, channel, x_row, past_row, k, WIDTH: tl.constexpr):
    """fp32 [rows, channels]: the inputs of tap k, which are a sequence's own, or before ``start``, if any are known.

    ``past``: [rows], the blocks with the inputs before each sequence.
    """
    source = row - (WIDTH - 1) + k
    own = source >= start
    before = past + (source - start + WIDTH - 1).to(tl.int64) * past_row
    at = tl.where(own[:, None], x + source.to(tl.int64)[:, None] * x_row, before[:, None]) + channel[None, :]
    return tl.load(at, mask=inside & (own | known)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _weights(weight, channel, channels, k, WIDTH: tl.constexpr):
    return tl.load(weight + channel * WIDTH + k, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _summed(
    x, past, weight, bias, row, start, known, inside, channel, channels, x_row, past_row,
    BIASED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What goes into silu: the bias, then the taps in order."""
    total = tl.zeros(inside.shape, dtype=tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        tap = _tap(x, past, row, start, known, inside, channel, x_row, past_row, k, WIDTH)
        total += tap * _weights(weight, channel, channels, k, WIDTH)[None, :]
    return total


@triton.jit
def _slope(
    x, past, weight, bias, grad, row, start, known, inside, channel, channels, x_row, past_row, grad_row,
    BIASED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, channels]: gradients of what goes into silu; 0 where not inside."""
    total = _summed(
        x, past, weight, bias, row, start, known, inside, channel, channels, x_row, past_row, BIASED, WIDTH
    )  # fmt: skip
    at = grad + row.to(tl.int64)[:, None] * grad_row + channel[None, :]
    share = sigmoid(total)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32) * share * (1.0 + total * (1.0 - share))


@triton.jit(do_not_specialize=["count"])
def _convolve(
    x, weight, bias, past, bounds, positions, slots, out, count, channels, x_row, past_block, past_row,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = _sequences(bounds, count, row)
    start = tl.load(bounds + sequence)
    inside = (row < tl.load(bounds + sequence + 1))[:, None] & (channel < channels)[None, :]
    known = tl.load(positions + sequence) > 0
    past += tl.load(slots + sequence) * past_block
    total = _summed(
        x, past, weight, bias, row, start, known, inside, channel, channels, x_row, past_row, BIASED, WIDTH
    )  # fmt: skip
    value = gpu.rounded(total / (1.0 + tl.exp(-total)), out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * channels + channel[None, :], value, mask=inside)


@triton.jit
def _remember(
    x, past, bounds, positions, slots, channels, x_row, past_block, past_row,
    WIDTH: tl.constexpr, PAST: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the last inputs of a sequence with new tokens to its block; PAST: a power of two, at least WIDTH - 1."""
    sequence = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    i = tl.arange(0, PAST)
    inside = ((i < WIDTH - 1) & (start < end))[:, None] & (channel < channels)[None, :]
    past += tl.load(slots + sequence) * past_block
    blocks = past + tl.zeros((PAST,), dtype=tl.int64)
    known = (i < WIDTH - 1) & (tl.load(positions + sequence) > 0)
    last = _tap(x, blocks, end + i, start, known, inside, channel, x_row, past_row, 0, WIDTH)
    tl.debug_barrier()  # a row moves within the block: all of them are read before one is written
    at = past + i.to(tl.int64)[:, None] * past_row + channel[None, :]
    tl.store(at, gpu.rounded(last, past.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gradients(
    x, weight, bias, past, bounds, positions, slots, grad, to_x, parts, count, channels,
    x_row, past_block, past_row, grad_row,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, LEVELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of the inputs, and from a tile of tokens those of weights and bias: parts [tiles, WIDTH + 1, channels]."""
    row = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = _sequences(bounds, count, row)
    start, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    inside = (row < end)[:, None] & (channel < channels)[None, :]
    known = tl.load(positions + sequence) > 0
    past += tl.load(slots + sequence) * past_block
    total, slope = tl.zeros(inside.shape, dtype=tl.float32), tl.zeros(inside.shape, dtype=tl.float32)
    for k in range(WIDTH):  # unrolled it would need more registers than there are
        # the row in which this one is tap k
        later = row + (WIDTH - 1 - k)
        there = inside & (later < end)[:, None]
        slope = _slope(
            x, past, weight, bias, grad, later, start, known, there, channel, channels, x_row, past_row, grad_row,
            BIASED, WIDTH,
        )  # fmt: skip
        total += slope * _weights(weight, channel, channels, k, WIDTH)[None, :]
    value = gpu.rounded(total, to_x.dtype.element_ty)
    tl.store(to_x + row.to(tl.int64)[:, None] * channels + channel[None, :], value, mask=inside)
    # the last slope is that of the rows themselves
    parts += tl.program_id(1).to(tl.int64) * (WIDTH + 1) * channels + channel
    for k in range(WIDTH):
        tap = _tap(x, past, row, start, known, inside, channel, x_row, past_row, k, WIDTH)
        tl.store(parts + k * channels, neighbours(slope * tap, LEVELS), mask=channel < channels)
    tl.store(parts + WIDTH * channels, neighbours(slope, LEVELS), mask=channel < channels)


@triton.jit
def _initial_gradients(
    x, weight, bias, past, bounds, positions, slots, grad, to_past, channels, x_row, past_block, past_row, grad_row,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, PAST: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    i = tl.arange(0, PAST)
    inside = (i < WIDTH - 1)[:, None] & (channel < channels)[None, :]
    past += tl.load(slots + sequence) * past_block + tl.zeros((PAST,), dtype=tl.int64)
    known = tl.load(positions + sequence + tl.zeros((PAST,), dtype=tl.int32)) > 0
    total = tl.zeros(inside.shape, dtype=tl.float32)
    for k in tl.static_range(WIDTH):
        row = start + i - k
        there = inside & ((row >= start) & (row < end))[:, None]
        slope = _slope(
            x, past, weight, bias, grad, row, start, known, there, channel, channels, x_row, past_row, grad_row,
            BIASED, WIDTH,
        )  # fmt: skip
        total += slope * _weights(weight, channel, channels, k, WIDTH)[None, :]
    at = to_past + (sequence.to(tl.int64) * (WIDTH - 1) + i)[:, None] * channels + channel[None, :]
    tl.store(at, gpu.rounded(total, to_past.dtype.element_ty), mask=inside)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], initial: Tensor | None) -> Tensor:
    """See ``dispatch.causal_conv1d``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _value(x, weight, bias, *_packed(x, lengths, initial), out)
    return out


def causal_conv1d_cached(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """See ``dispatch.causal_conv1d_cached``; launches depend on shapes alone, and nothing waits for the device."""
    if state.stride(2) != 1:
        raise ValueError(f"a state with strides {state.stride()}; channels have to lie side by side")
    out = x.new_zeros(x.shape)
    _value(x, weight, bias, bounds, positions, slots, state, out)
    width = weight.shape[1]
    if len(slots) and width > 1:
        x, tile = _side_by_side(x), tiles.gpu(x.device).conv
        _remember[triton.cdiv(x.shape[1], tile.n), len(slots)](
            x, state, bounds, positions, slots, x.shape[1], x.stride(0), *state.stride()[:2],
            WIDTH=width, PAST=triton.next_power_of_2(width - 1), CHANNELS=tile.n, **gpu.options(tile),
        )  # fmt: skip
    return out


def gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], initial: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See ``reference.gradients``."""
    x, grad, tile = _side_by_side(x), _side_by_side(grad), tiles.gpu(x.device).conv
    (tokens, channels), width = x.shape, weight.shape[1]
    bounds, positions, slots, past = _packed(x, lengths, initial)
    to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_initial = None if initial is None else torch.empty(initial.shape, dtype=initial.dtype, device=x.device)
    blocks, count = triton.cdiv(channels, tile.n), triton.cdiv(tokens, tile.m)
    parts = torch.empty(count, width + 1, channels, dtype=torch.float32, device=x.device)
    read = (x, weight.contiguous(), x if bias is None else bias.contiguous(), past, bounds, positions, slots, grad)
    strides = (x.stride(0), *past.stride()[:2], grad.stride(0))
    constants = {"BIASED": bias is not None, "WIDTH": width, "CHANNELS": tile.n, **gpu.options(tile)}
    if to_x.numel():
        _gradients[blocks, count](
            *read, to_x, parts, len(lengths), channels, *strides,
            TOKENS=tile.m, LEVELS=tile.m.bit_length() - 1, **constants,
        )  # fmt: skip
    if to_initial is not None and to_initial.numel():
        constants["PAST"] = triton.next_power_of_2(width - 1)
        _initial_gradients[blocks, len(lengths)](*read, to_initial, channels, *strides, **constants)
    sums = row_sum(parts.flatten(1)).view(width + 1, channels)
    to_bias = None if bias is None else sums[width].to(bias.dtype)
    return to_x, sums[:width].T.to(weight.dtype), to_bias, to_initial


def _packed(x: Tensor, lengths: list[int], initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds, positions, slots and blocks of documents as of sequences with a cache; without past inputs any memory."""
    bounds = bounds_of(lengths, x.device)
    slots = torch.arange(len(lengths), device=x.device)
    positions = torch.full((len(lengths),), int(initial is not None), dtype=torch.int32, device=x.device)
    return bounds, positions, slots, x[:, None] if initial is None else _side_by_side(initial)


def _value(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bounds: Tensor,
    positions: Tensor,
    slots: Tensor,
    past: Tensor,
    out: Tensor,
) -> None:
    if not out.numel():
        return
    x, tile = _side_by_side(x), tiles.gpu(x.device).conv
    tokens, channels = x.shape
    _convolve[triton.cdiv(channels, tile.n), triton.cdiv(tokens, tile.m)](
        x, weight.contiguous(), x if bias is None else bias.contiguous(), past, bounds, positions, slots, out,
        len(slots), channels, x.stride(0), *past.stride()[:2],
        BIASED=bias is not None, WIDTH=weight.shape[1], TOKENS=tile.m, CHANNELS=tile.n, **gpu.options(tile),
    )  # fmt: skip


def _side_by_side(x: Tensor) -> Tensor:
    """``x`` with channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
