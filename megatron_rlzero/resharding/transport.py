"""Moves what a plan says: local copies, and packed point-to-point messages over a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.resharding.plan import Transfer

#: Transfers between two ranks are packed into messages of at most this many bytes (one box never splits).
MESSAGE_BYTES = 64 * 2**20


def messages(transfers: Sequence[Transfer], itemsize: int) -> Iterator[list[Transfer]]:
    """Packs transfers of one (source, target) pair together, in plan order, up to MESSAGE_BYTES each."""
    pair = lambda t: (t.source, t.target)  # noqa: E731
    for _, group in groupby(sorted(transfers, key=pair), key=pair):
        bucket, size = [], 0
        for transfer in group:
            nbytes = transfer.box.numel * itemsize
            if bucket and size + nbytes > MESSAGE_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(transfer)
            size += nbytes
        yield bucket


def execute(
    transfers: Sequence[Transfer],
    rank: int,
    group: ProcessGroup | None,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    dtype: torch.dtype,
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Carries out this rank's part of a plan; ranks are those of ``group``, and every rank calls it.

    Args:
        source: local tensor name -> tensor, for what this rank sends (dtype ``dtype``).
        target: local tensor name -> tensor, for what this rank receives; written in place.
        dtype: element type on the wire; both sides hold it, nothing is converted.
        timeout: for each message.

    Messages go one after the other in one global order, so that no two ranks can wait for each other.

    Raises:
        TypeError: a tensor of another dtype, named.
        RuntimeError: from the process group, when a peer is gone or the deadline has passed.
    """
    for bucket in messages(transfers, dtype.itemsize):
        sender, receiver = bucket[0].source, bucket[0].target
        if rank == sender == receiver:
            for t in bucket:
                _view(target, t.target_local, t.target_box.slices, dtype).copy_(
                    _view(source, t.source_local, t.source_box.slices, dtype)
                )
        elif rank == sender:
            parts = [_view(source, t.source_local, t.source_box.slices, dtype).reshape(-1) for t in bucket]
            _wait(group.send([torch.cat(parts)], receiver, 0), timeout)
        elif rank == receiver:
            flat = torch.empty(
                sum(t.box.numel for t in bucket), dtype=dtype, device=target[bucket[0].target_local].device
            )
            _wait(group.recv([flat], sender, 0), timeout)
            for t, part in zip(bucket, flat.split([t.box.numel for t in bucket]), strict=True):
                _view(target, t.target_local, t.target_box.slices, dtype).copy_(part.view(t.box.shape))


def _view(tensors: Mapping[str, Tensor], name: str, index: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, but the transfer carries {dtype}")
    return tensor.detach()[index]


def _wait(work: torch.distributed.Work, timeout: timedelta) -> None:
    work.wait(timeout)
