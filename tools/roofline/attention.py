"""Launches of attention: of documents, forward and backward, and of one new token of each sequence over a cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from megatron_rlzero.kernels.attention.triton import PARTIAL, width
from megatron_rlzero.kernels.tiles import round_up
from tools.roofline.launch import BF16, TILES, WIDE, Both, Launch, passed

#: steps for each score, forward and in each of the two backward kernels
SCORE, SCORE_BACK = 10, 8


def _visits(lengths: Sequence[int], group: int, m: int, n: int, by_keys: bool = False) -> tuple[float, float]:
    """(scores that tiles of m rows and n keys compute, those that a row sees), of one KV head."""
    done = 0
    for length in lengths:
        rows = length * group
        if by_keys:  # rows from the first that sees the tile of keys
            done += sum(n * round_up(rows - begin * group, m) for begin in range(0, length, n))
        else:  # keys up to the last that the tile of rows sees
            last = (min(begin + m, rows) - 1 for begin in range(0, rows, m))
            done += sum(m * round_up(row // group + 1, n) for row in last)
    return float(done), sum(length * (length + 1) / 2 * group for length in lengths)


def attention(lengths: Sequence[int], heads: int, kv_heads: int, dim: int) -> Both:
    """Forward: two products for a score, of so many rows that all keys of a row are one program's.

    Backward computes scores again, in a kernel for the keys (four products) and in one for the queries (three).
    """
    t, group, d = sum(lengths), heads // kv_heads, width(dim)
    q, kv, sums = BF16 * t * heads * dim, BF16 * t * kv_heads * dim, WIDE * t * heads
    m, n = TILES.attention.m, TILES.attention.n
    done, seen = (kv_heads * x for x in _visits(lengths, group, m, n))
    forward = Launch(2 * q + 2 * kv + sums, 4 * d * done, filled=4 * dim * seen, steps=SCORE * done)
    tile = TILES.attention_backward
    by_rows = kv_heads * _visits(lengths, group, m, tile.n)[0]
    by_keys = kv_heads * _visits(lengths, group, tile.m, tile.n, by_keys=True)[0]
    read = 2 * q + 2 * kv + 2 * sums  # q, the gradient of the result, k, v, log-sum-exp, delta
    backward = [
        Launch(2 * q + sums, steps=2.0 * t * heads * dim),
        Launch(read + 2 * kv, 8 * d * by_keys, filled=8 * dim * seen, steps=SCORE_BACK * by_keys),
        Launch(read + q, 6 * d * by_rows, filled=6 * dim * seen, steps=SCORE_BACK * by_rows),
    ]
    return [forward], backward


def decode(sequences: int, keys: int, heads: int, kv_heads: int, dim: int) -> list[Launch]:
    """One new token of each sequence; the cache is read once, states of ranges of keys are written and merged.

    The block table is as wide as the longest sequence, of ``keys`` tokens like all.
    """
    tile, d, rows = TILES.attention, width(dim), sequences * heads
    apart = ceil(keys / tile.split)
    apart = apart if apart * rows * dim <= PARTIAL else 1
    done = sequences * kv_heads * round_up(heads // kv_heads, tile.m) * round_up(keys, tile.n)
    result = BF16 * rows * dim + WIDE * rows
    states = WIDE * apart * rows * (dim + 2) if apart > 1 else 0
    attend = Launch(
        BF16 * (rows * dim + 2 * sequences * keys * kv_heads * dim) + (states or result),
        4.0 * d * done,
        filled=4.0 * dim * rows * keys,
        steps=SCORE * done,
    )
    stored = passed(2 * sequences * kv_heads * dim, BF16, BF16)
    zeros = passed(rows * dim, 0, BF16)
    return [zeros, stored, attend, *([Launch(states + result, steps=4.0 * apart * rows * dim)] if states else [])]
