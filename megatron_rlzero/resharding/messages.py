"""Packs a plan's transfers into messages: few of them, each of bounded size, in one order that all ranks know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from megatron_rlzero.resharding.plan import Transfer

#: Transfers between two ranks are packed into messages of at most this many bytes (one box never splits): large enough
#: that few are sent, small enough that packing stays in the processor's cache (tools/bench_refit.py).
MESSAGE_BYTES = 4 * 2**20


def messages(transfers: Sequence[Transfer], itemsizes: Mapping[str, int]) -> Iterator[tuple[int, list[Transfer]]]:
    """(number among those of its pair, transfers of one (source, target) pair in plan order) each.

    A rank that knows its own transfers alone gets the same messages.
    """
    pair = lambda t: (t.source, t.target)  # noqa: E731
    for _, group in groupby(sorted(transfers, key=pair), key=pair):
        bucket, size, number = [], 0, 0
        for transfer in group:
            nbytes = transfer.box.numel * itemsizes[transfer.tensor]
            if bucket and size + nbytes > MESSAGE_BYTES:
                yield number, bucket
                bucket, size, number = [], 0, number + 1
            bucket.append(transfer)
            size += nbytes
        yield number, bucket
