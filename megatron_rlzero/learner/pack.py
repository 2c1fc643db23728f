"""Packs whole responses into microbatches: balanced tokens, the same number of microbatches on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Assigns responses to microbatches of the data-parallel ranks.

    Args:
        lengths: tokens of each response.
        ranks: data-parallel size.
        max_tokens: capacity of a microbatch.

    Returns:
        [rank][microbatch] -> indices into ``lengths``, ascending. Every rank has the same, smallest possible number of
        microbatches for which longest-first placement on the emptiest one fits. A microbatch is empty only where there
        are fewer responses than microbatches.

    Raises:
        ValueError: for a response longer than ``max_tokens``.
    """
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"response {i} has {length} tokens, learner.max_tokens_per_microbatch = {max_tokens}; raise it"
            )
    count = max(1, -(-sum(lengths) // (ranks * max_tokens)))
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    while True:
        bins: list[list[int]] = [[] for _ in range(ranks * count)]
        loads = [0] * len(bins)
        for i in longest_first:
            emptiest = min(range(len(bins)), key=lambda b: (loads[b], b))
            bins[emptiest].append(i)
            loads[emptiest] += lengths[i]
        if max(loads) <= max_tokens:
            # Bin b goes to rank b mod ranks: longest-first placement deals similar loads to neighbouring bins.
            return [[sorted(bins[m * ranks + r]) for m in range(count)] for r in range(ranks)]
        count += 1
