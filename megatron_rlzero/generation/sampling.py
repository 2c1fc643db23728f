"""Counter-based Gumbel noise: a draw depends on its key, position and token id, and on nothing else.

argmax(log p + Gumbel noise) is an exact sample of p (Gumbel 1954; Maddison, Tarlow and Minka, A* Sampling, 2014).
The bits are those of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014),
which gives the n-th number of a stream without the ones before it: mix(state + n * GAMMA), here n = token id + 1
and state a hash of the key and the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = 2**64 - 1
#: vocabulary entries that are drawn at once: on a CPU their intermediates stay in the cache, a GPU has fewer launches
BLOCK, GPU_BLOCK = 2048, 2**15


def stream(key: Sequence[int]) -> int:
    """A 64-bit state for a key of integers, in the range of int64: the key's parts are absorbed one by one.

    The parts are (run seed, epoch, item, sample); evaluation has epoch -1.
    """
    state = 0
    for part in key:
        state = _mix_int((state + GAMMA) ^ _mix_int((part + GAMMA) & MASK))
    return _signed(state)


def sample(logits: Tensor, streams: Tensor, positions: Tensor, temperature: float = 1.0) -> Tensor:
    """One token per row, drawn from softmax(logits / temperature) by the row's own noise.

    Args:
        logits: [rows, vocabulary], any floating dtype; -inf marks tokens that cannot be drawn.
        streams: int64 [rows], ``stream(key)`` of each row.
        positions: int64 [rows], number of tokens of the response before this one.

    Returns:
        int64 [rows]. Of equal maxima the lowest id is taken. Logits and noise are added in float64.
    """
    rows, vocabulary = logits.shape
    best = torch.full((rows,), -torch.inf, dtype=torch.float64, device=logits.device)
    token = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    block = BLOCK if logits.device.type == "cpu" else GPU_BLOCK
    for start in range(0, vocabulary, block):
        ids = torch.arange(start, min(start + block, vocabulary), device=logits.device)
        noised = logits[:, start : start + block].double() / temperature + gumbel(streams, positions, ids)
        value, index = noised.max(dim=1)
        better = value > best
        best = torch.where(better, value, best)
        token = torch.where(better, index + start, token)
    return token


def gumbel(streams: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [rows, ids], from int64 streams [rows], positions [rows] and token ids."""
    state = _mix(streams ^ _mix(positions * _signed(GAMMA) + _signed(GAMMA)))
    bits = _mix(state[:, None] + (ids[None, :] + 1) * _signed(GAMMA))
    # 53 bits and a half: never 0 and never 1
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap, as the algorithm wants."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ _shift(z, shift)) * _signed(multiplier)
    return z ^ _shift(z, SHIFTS[2])


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _mix_int(z: int) -> int:
    z &= MASK
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = (z ^ (z >> shift)) * multiplier & MASK
    return z ^ (z >> SHIFTS[2])


def _signed(z: int) -> int:
    """The int64 with the bits of ``z``."""
    return z - 2**64 if z >= 2**63 else z
