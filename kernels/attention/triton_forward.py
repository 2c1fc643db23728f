"""Attention's kernels: one state of a row per range of keys, the ranges merged from the first one on.

The arithmetic of one row, in fp32. ``SPLIT`` keys form a range and ``N`` keys a block, counted from key 0 of the
sequence; of keys that the row does not see, nothing but zeros goes in.

    s_k = (sum_d q_d k_kd) * scale                  products of q's dtype, summed by a tile's dot
    a range, block after block, from the state m = -inf, w = 0, o = 0:
        m' = max(m, s_k of the block);  a = exp(m - m');  p_k = exp(s_k - m')
        w  = w * a + (sum_k p_k)                    summed along a tile's row
        o  = o * a + sum_k p_k v_k                  p_k rounded to v's dtype; summed by a tile's dot, onto o * a
    all ranges, one after the other, from the state top = -inf, total = 0, value = 0:
        top' = max(top, m);  a = exp(top - top');  b = exp(m - top')
        total = total * a + w * b;  value = value * a + o * b
    result = value / total, rounded once;  log-sum-exp = top + log(total)

A block or a range of which a row sees nothing multiplies by exp(0) = 1 and adds zero: it may be there or not.
"""

import triton
import triton.language as tl

from megatron_rlzero.kernels import gpu, segments


@triton.jit
def rows_of(starts, lengths, bounds, sequences, group, M: tl.constexpr):
    """The rows of this program's tile: pairs of a new token and a query head of the group, heads of a token together.

    Returns the sequence; the first row's token of the batch and its position in the sequence; then of shape [M] how
    many tokens further a row's is, its head in the group, and whether there is such a row; at last how many keys the
    last row sees, none where the tile has no row. Kernels ask again behind a loop: what is computed again, from a
    volatile number, needs no registers in the meantime.
    """
    tile = tl.program_id(0)
    i = segments.segment_of(bounds, sequences, tile)
    start = tl.load(starts + i)
    new = tl.load(starts + i + 1) - start
    earlier = tl.load(lengths + i) - new
    begin = (tile - tl.load(bounds + i, volatile=True)) * M
    last = tl.minimum(begin + M, new * group) - 1
    keys = tl.where(begin <= last, earlier + last // group + 1, 0)
    token, row = begin // group, begin + tl.arange(0, M)
    return tl.cast(i, tl.int64), start + token, earlier + token, row // group - token, row % group, row <= last, keys


@triton.jit
def _empty(M: tl.constexpr, D: tl.constexpr):
    """The state of no keys: largest score [M], sum of weights [M], sum of weighted values [M, D]."""
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)


@triton.jit
def _merged(top, total, value, next_top, next_total, next_value):
    """The state of some keys and the ones after them; where one is empty, the bits of the other."""
    highest = tl.maximum(top, next_top)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is no number
    a, b = tl.exp(top - shift), tl.exp(next_top - shift)
    return highest, total * a + next_total * b, value * a[:, None] + next_value * b[:, None]


@triton.jit
def _store(top, total, value, out, sums, row, real, DIM: tl.constexpr, D: tl.constexpr):
    """Result and log-sum-exp of rows ``row`` [M] of out [rows, DIM] and sums [rows], both contiguous."""
    d = tl.arange(0, D)
    # a weight of zero may have turned -0 into 0 or not: the sum with 0 is 0 either way
    result = gpu.rounded(value / total[:, None] + 0.0, out.dtype.element_ty)
    tl.store(out + (row[:, None] * DIM + d[None, :]), result, mask=real[:, None] & (d[None, :] < DIM))
    tl.store(sums + row, top + tl.log(total), mask=real)


@triton.jit(do_not_specialize=["table_row", "sequences", "group", "rows", "per", "scale"])
def attend(
    q, keys, values, out, sums, states, parts, table, starts, lengths, bounds,
    table_row, sequences, group, rows, per, scale, q_token, q_head, k_block, k_head, k_row,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program: tile of rows, KV head, ``per`` ranges. If these are not all, their state is written instead of results.

    states: fp32 [ranges, 2, rows]; parts: fp32 [ranges, rows, DIM]. Rows are tokens x query heads.
    """
    i, token, position, ahead, member, real, end = rows_of(starts, lengths, bounds, sequences, group, M)
    head, index = tl.program_id(1), tl.program_id(2)
    d, n = tl.arange(0, D), tl.arange(0, N)
    begin = index * per * SPLIT
    if begin < end:
        # pointers are int64, offsets in a tile int32, which saves registers
        q += token.to(tl.int64) * q_token + head.to(tl.int64) * group * q_head
        q_at = ahead[:, None] * q_token + member[:, None] * q_head + d[None, :]
        x = tl.load(q + q_at, mask=real[:, None] & (d[None, :] < DIM), other=0.0)
        pages = table + i * table_row
        keys += head.to(tl.int64) * k_head
        values += head.to(tl.int64) * k_head
        offsets = n[:, None] * k_row + d[None, :]
        nothing = tl.full((M, N), 0.0, tl.float32)
        top, total, value = _empty(M, D)
        for split in range(begin, tl.minimum(begin + per * SPLIT, end), SPLIT):
            m, w, o = _empty(M, D)
            for first in range(split, tl.minimum(split + SPLIT, end), N):
                page = tl.load(pages + first // PAGE).to(tl.int64)
                at = page * k_block + tl.cast(first % PAGE, tl.int64) * k_row
                there = (n < end - first)[:, None] & (d[None, :] < DIM)
                k = tl.load(keys + at + offsets, mask=there, other=0.0)
                scores = gpu.dot(x, tl.trans(k), nothing) * scale
                scores = tl.where(n[None, :] <= (position - first + ahead)[:, None], scores, float("-inf"))
                highest = tl.maximum(m, tl.max(scores, axis=1))
                shift = tl.where(highest == float("-inf"), 0.0, highest)
                weights = tl.exp(scores - shift[:, None])
                a = tl.exp(m - shift)
                w = w * a + tl.sum(weights, axis=1)
                v = tl.load(values + at + offsets, mask=there, other=0.0)
                o = gpu.dot(gpu.rounded(weights, v.dtype), v, o * a[:, None])
                m = highest
            top, total, value = _merged(top, total, value, m, w, o)
        _, token, _, ahead, member, real, _ = rows_of(starts, lengths, bounds, sequences, group, M)
        heads = tl.num_programs(1) * group
        first_row, row = token.to(tl.int64) * heads + head * group, ahead * heads + member
        if tl.num_programs(2) == 1:
            _store(top, total, value, out + first_row * DIM, sums + first_row, row, real, DIM, D)
        else:
            states += index.to(tl.int64) * 2 * rows + first_row
            tl.store(states + row, top, mask=real)
            tl.store(states + rows + row, total, mask=real)
            parts += (index.to(tl.int64) * rows + first_row) * DIM
            tl.store(parts + (row[:, None] * DIM + d[None, :]), value, mask=real[:, None] & (d[None, :] < DIM))


@triton.jit(do_not_specialize=["sequences", "group", "rows"])
def merge(
    out, sums, states, parts, starts, lengths, bounds, sequences, group, rows,
    SPLIT: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Results of a tile of rows and a KV head, from the states that programs with one range each have written."""
    _, token, _, ahead, member, real, end = rows_of(starts, lengths, bounds, sequences, group, M)
    heads = tl.num_programs(1) * group
    first_row, row = token.to(tl.int64) * heads + tl.program_id(1) * group, ahead * heads + member
    d = tl.arange(0, D)
    there, places = real[:, None] & (d[None, :] < DIM), row[:, None] * DIM + d[None, :]
    if end > 0:
        top, total, value = _empty(M, D)
        for index in range(0, tl.cdiv(end, SPLIT)):
            state = states + (tl.cast(index, tl.int64) * 2 * rows + first_row)
            m = tl.load(state + row, mask=real, other=0.0)
            w = tl.load(state + rows + row, mask=real, other=1.0)
            o = tl.load(parts + (tl.cast(index, tl.int64) * rows + first_row) * DIM + places, mask=there, other=0.0)
            top, total, value = _merged(top, total, value, m, w, o)
        _store(top, total, value, out + first_row * DIM, sums + first_row, row, real, DIM, D)


@triton.jit(do_not_specialize=["tokens"])
def write(
    k, v, cache, slots, tokens, k_token, k_head, v_token, v_head, block, head_of_block,
    PAGE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Program: M new tokens, KV head, whose keys and values it copies into the cache."""
    token, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    there = (slot >= 0)[:, None] & (d[None, :] < DIM)
    row = token.to(tl.int64)[:, None]
    at = cache + (slot // PAGE * block + head * head_of_block)[:, None] + (slot % PAGE * DIM)[:, None] + d[None, :]
    tl.store(at, tl.load(k + row * k_token + head * k_head + d[None, :], mask=there), mask=there)
    tl.store(at + PAGE * DIM, tl.load(v + row * v_token + head * v_head + d[None, :], mask=there), mask=there)
