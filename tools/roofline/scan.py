"""Launches of the Mamba-2 scan, whose products of the state are fp32, and which computes whole chunks.

A head has a state of P rows and N columns. Products of a chunk of Q tokens are counted per row, of which a program has
tiles of m channels: scores and gradients of scores are bf16 products, all others fp32 ones. Forward, the state of the
documents at work is taken to stay in the L2 cache; backward, states of all chunks go through memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from megatron_rlzero.kernels.tiles import CHUNK as Q
from tools.roofline.launch import BF16, TILES, WIDE, Both, Launch

#: steps for each pair of tokens of a chunk and tile of channels: the decay from one to the other, and its use
PAIR = 10
#: rows of the product with ones that adds up columns
ONES = 16


def scan(lengths: Sequence[int], H: int, P: int, G: int, N: int) -> Both:
    """Forward: scores for every tile of channels, what the state leaves, the move of the state, the chunk's own part.

    Backward: the states before all chunks and the gradients behind them; gradients of x, dt, A and D of a head's chunk;
    those of B and C of a group's chunk.
    """
    t, chunks, slices = sum(lengths), sum(ceil(length / Q) for length in lengths), ceil(P / TILES.scan.m)
    rows, groups = chunks * Q * H, BF16 * t * G * N
    x, states, passed = BF16 * t * H * P, WIDE * chunks * H * P * N, WIDE * chunks * H * Q * Q
    steps, real = float(PAIR * rows * Q), t / (chunks * Q)

    def launch(moved: float, matrix: float, fp32: float, steps: float) -> Launch:
        """FLOPs per row."""
        return Launch(moved, rows * matrix, rows * fp32, real * rows * (matrix + fp32), steps)

    forward = launch(2 * x + 2 * groups + BF16 * t * H, 2 * Q * N * slices, 4 * P * N + 2 * Q * P, slices * steps)
    carry = launch(states + x + groups, 0, 2 * P * N, 0.0)
    sums = 2 * ONES * (2 * P + TILES.scan.m * TILES.scan.n / Q + 2 * Q)
    tokens = launch(
        2 * states + 3 * x + 2 * groups + passed + 3 * WIDE * t * H,
        2 * Q * (N + P),
        4 * P * N + 2 * Q * P + 2 * Q * Q + sums,
        steps,
    )
    columns = ceil(N / TILES.scan.n)
    of_groups = launch(2 * states + 2 * x + 4 * groups + passed, 0, 4 * P * N + 4 * Q * N * G / H, columns * steps)
    return [forward], [carry, carry, tokens, of_groups]


def decode(sequences: int, H: int, P: int, G: int, N: int) -> list[Launch]:
    """One new token of each sequence, on average in the middle of its chunk.

    The chunk's tokens so far and the state are read, all of the chunk's rows are computed, and the state moves, and is
    written, once in Q steps.
    """
    rows, slices = sequences * Q * H, ceil(P / TILES.scan.m)
    so_far = Q // 2 * (BF16 * H * P + WIDE * H + BF16 * G * N)
    new = BF16 * (2 * H * P + 2 * G * N)
    state = WIDE * H * P * N * (1 + 1 / Q)
    matrix, fp32 = 2 * Q * N * slices, 2 * P * N * (1 + 1 / Q) + 2 * Q * P
    step = Launch(
        sequences * (state + so_far + new),
        float(rows * matrix),
        rows * fp32,
        rows * (matrix + fp32) / Q,
        float(slices * PAIR * rows * Q),
    )
    return [step, Launch(2 * BF16 * sequences * (H * P + G * N))]
