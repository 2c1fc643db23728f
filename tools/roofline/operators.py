"""Launches of every operator but attention and scan: forward and backward, or of a decode step."""

from __future__ import annotations

from math import ceil

import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.log_prob.dispatch import _chunks
from megatron_rlzero.kernels.tiles import VOCABULARY, round_up
from tools.roofline.launch import BF16, TILES, WIDE, Both, Launch, passed


def product(m: int, n: int, k: int, batch: int = 1, element: int = BF16, out: int = BF16) -> Launch:
    """[batch, m, k] by [batch, k, n]: operands read, the result written."""
    done = {"fp32" if element == WIDE else "matrix": _whole_tiles(m, n, k, batch, element)}
    return Launch(batch * (element * (m * k + k * n) + out * m * n), filled=2.0 * batch * m * n * k, **done)


def _whole_tiles(m: int, n: int, k: int, batch: int, element: int = BF16) -> float:
    """FLOPs of so many products."""
    tile = TILES.product_fp32 if element == WIDE else TILES.product
    return 2.0 * batch * round_up(m, tile.m) * round_up(n, tile.n) * round_up(k, tile.k)


def tree(rows: int, columns: int, element: int = WIDE) -> list[Launch]:
    """Rows added as neighbours, up to TILES.tree.m of them a launch."""
    launches = []
    while rows > 1:
        left = ceil(rows / TILES.tree.m)
        launches.append(Launch(element * columns * (rows + left), steps=columns * (rows - left)))
        rows = left
    return launches


def sliced_product(t: int, n: int, k: int, slices: int, blocks: int = 1) -> list[Launch]:
    """x [t, k] by a weight [k, n] over slices of k, fp32 partial results, their tree, rounding to bf16.

    More than one block of k: a slice's parts are first copied together.
    """
    copies = [passed(t * k + k * n, BF16, BF16)] if blocks > 1 else []
    parts = product(t, n, k // slices, slices, out=WIDE)
    return [*copies, parts, *tree(slices, t * n), passed(t * n, WIDE, BF16)]


def column_parallel(t: int, n: int, k: int, slices: int, blocks: int = 1) -> Both:
    """y [t, n] of x [t, k]; backward: the gradient of x over slices of n, and that of the weight."""
    return [product(t, n, k)], [*sliced_product(t, k, n, slices, blocks), product(n, k, t)]


def row_parallel(t: int, n: int, k: int, slices: int) -> Both:
    """y [t, n] of x [t, k] over slices of k; backward: two products."""
    return sliced_product(t, n, k, slices), [product(t, k, n), product(n, k, t)]


def norm(t: int, groups: int, size: int, gated: bool = False) -> Both:
    """Rows of ``size`` numbers, ``groups`` of each token; backward: x read twice, partial weight gradients, a tree."""
    numbers, inputs = t * groups * size, BF16 * (1 + gated)
    forward = [passed(numbers, inputs, BF16, 5 + 5 * gated)]
    chunks = ceil(t / tiles.ROWS)
    weight = Launch(numbers * (inputs + BF16) + WIDE * chunks * groups * size, steps=numbers * (4 + 5 * gated))
    return forward, [passed(numbers, inputs + BF16, inputs, 10 + 10 * gated), weight, *tree(chunks, groups * size)]


def rotary(t: int, heads: int, dim: int) -> Both:
    """Read and written; a token's angles once. The gradient is the same kernel."""
    once = [Launch(t * (2 * BF16 * heads * dim + WIDE * dim), steps=3.0 * t * heads * dim)]
    return once, once


def gate(t: int, hidden: int, experts: int) -> Both:
    """fp32 logits of bf16 numbers: x and the weight are copied to fp32, and multiplied on fp32 units."""
    wide = [passed(t * hidden, BF16, WIDE), passed(experts * hidden, BF16, WIDE)]
    back = [product(t, hidden, experts, element=WIDE, out=WIDE), passed(t * hidden, WIDE, BF16)]
    weight = [product(experts, hidden, t, element=WIDE, out=WIDE), passed(experts * hidden, WIDE, BF16)]
    return [*wide, product(t, experts, hidden, element=WIDE, out=WIDE)], [*wide, *back, *weight]


def top_k(t: int, experts: int, k: int, biased: bool) -> Both:
    """fp32 scores, then the choice, which looks at every score three times for each of k slots."""
    scores = [passed(t * experts, WIDE, WIDE, 8), *([passed(t * experts, WIDE, WIDE, 1)] if biased else [])]
    choice = Launch(t * (2 * WIDE * experts + 12 * k), steps=15.0 * t * experts * k)
    return [*scores, choice], [Launch(t * (2 * WIDE * experts + 12 * k), steps=8.0 * t * experts * k)]


def grouped_linear(rows: int, experts: int, n: int, k: int, x: int | None = None) -> Both:
    """rows / experts rows [k] for each expert, times its own weight; ``x``: rows of x if some are read several times.

    Backward: the gradients of x, and of every expert's weight, over its rows.
    """
    each, inputs, outputs, weights = ceil(rows / experts), (x or rows) * k, rows * n, experts * n * k
    moved, filled = BF16 * (inputs + outputs + weights), 2.0 * rows * n * k
    forward, to_x, to_weights = (
        Launch(moved, _whole_tiles(*sizes, batch=experts), filled=filled)
        for sizes in ((each, n, k), (each, k, n), (n, k, each))
    )
    return [forward], [to_x, to_weights]


def activation(rows: int, size: int, gated: bool) -> Both:
    """silu and multiply of 2 size numbers, or a squared ReLU of size."""
    inputs = BF16 * (1 + gated)
    forward = passed(rows * size, inputs, BF16, 6 if gated else 2)
    return [forward], [passed(rows * size, inputs + BF16, inputs, 12 if gated else 3)]


def combine(t: int, k: int, hidden: int) -> Both:
    """k outputs of each token read, their sum written; backward: outputs and the gradient read, k gradients written."""
    forward = Launch(BF16 * t * hidden * (k + 1), steps=2.0 * t * k * hidden)
    return [forward], [Launch(BF16 * t * hidden * (2 * k + 1), steps=3.0 * t * k * hidden)]


def convolution(t: int, channels: int, taps: int) -> Both:
    """Inputs read, results written. Backward computes the sum again for each tap; sums of 32 tokens, their tree."""
    forward = passed(t * channels, BF16, BF16, 2 * taps + 5)
    parts = ceil(t / TILES.conv.m)
    each = taps * (2 * taps + 12) + 2 * taps + 1
    backward = Launch(3 * BF16 * t * channels + WIDE * parts * (taps + 1) * channels, steps=float(t * channels * each))
    return [forward], [backward, *tree(parts, (taps + 1) * channels)]


def decode_convolution(sequences: int, channels: int, taps: int) -> list[Launch]:
    """The new input and those before it are read, the result and the last ones written."""
    sums = Launch(BF16 * sequences * channels * (taps + 2), steps=float(sequences * channels * (2 * taps + 5)))
    return [sums, passed(sequences * channels, BF16 * (taps - 1), BF16 * (taps - 1))]


def chunks(t: int, vocabulary: int) -> list[int]:
    """Rows of each chunk of log-probabilities."""
    return [rows.stop - rows.start for rows in _chunks(torch.empty(t, 0, device="meta"), vocabulary)]


def log_prob(t: int, hidden: int, vocabulary: int, slices: int) -> Both:
    """Logits of a chunk of rows at a time, each reading the whole head.

    Backward makes the logits again, then the gradients; the head's, fp32, is computed for a chunk and added to that of
    the chunks so far.
    """
    forward, head = [], vocabulary * hidden
    backward = [passed(head, 0, WIDE)]
    for n in chunks(t, vocabulary):
        logits, ids = product(n, vocabulary, hidden), n * vocabulary
        forward += [logits, passed(ids, BF16, 3 * WIDE / VOCABULARY, 18)]
        to_hidden = sliced_product(n, hidden, vocabulary, slices)
        weight = [product(vocabulary, hidden, n, out=WIDE), passed(head, 2 * WIDE, WIDE, 1)]
        backward += [logits, passed(ids, BF16, BF16, 15), *to_hidden, *weight]
    return forward, [*backward, passed(head, WIDE, BF16)]


def log_softmax(rows: int, hidden: int, vocabulary: int) -> list[Launch]:
    """The engine's head: bf16 logits, one pass over them, then torch's four: cast, division and two differences."""
    ids = rows * vocabulary
    once, by_torch = passed(ids, BF16, 3 * WIDE / VOCABULARY, 18), passed(ids, BF16 + 3 * WIDE, 4 * WIDE, 10)
    return [product(rows, vocabulary, hidden), once, by_torch]
