"""What learner ranks and a server's workers agree on for a transfer: one process group, and the plan as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.plan import Transfer

#: begins what a server says of weights that it will not take; its old weights and version stay
REFUSED = "refused the weights"


def join(store: TCPStore, rank: int, size: int, backend: str, interface: str, deadline_s: float) -> ProcessGroup:
    """The group of one server: learner ranks first, its workers after them. Every rank calls it.

    It is a group of its own, outside ``torch.distributed``'s default group and vLLM's. gloo's is on ``interface``;
    NCCL finds its way by NCCL_SOCKET_IFNAME.

    Raises:
        RuntimeError: the others did not join within ``deadline_s`` seconds.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=deadline_s)
        return dist.ProcessGroupNCCL(PrefixStore("refit", store), rank, size, options)
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=deadline_s)
    options._devices = [ProcessGroupGloo.create_device(interface=interface)]
    return ProcessGroupGloo(PrefixStore("refit", store), rank, size, options)


def to_json(transfers: Sequence[Transfer]) -> list[list[Any]]:
    """Transfers to a server's workers; what only the sender has to know is left out."""
    return [
        [t.source, t.target, t.tensor, t.box.start, t.box.stop, t.target_local, t.target_box.start, t.transform]
        for t in transfers
    ]


def from_json(rows: Sequence[Sequence[Any]], target: int) -> list[Transfer]:
    """The transfers to rank ``target``, in the sender's order."""
    transfers = []
    for source, to, tensor, start, stop, local, at, transform in rows:
        if to == target:
            box = Box(tuple(start), tuple(stop))
            target_box = box.shift(b - a for a, b in zip(start, at, strict=True))
            transfers.append(Transfer(source, to, tensor, box, "", box, local, target_box, transform))
    return transfers
