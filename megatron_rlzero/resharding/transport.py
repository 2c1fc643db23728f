"""Moves what a plan says: local copies, and packed point-to-point messages over a process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.resharding.messages import messages
from megatron_rlzero.resharding.plan import Transfer

#: Messages that one rank has under way at a time: while one travels the next is packed.
WINDOW = 2
#: Elementwise functions whose values a layout may keep in the place of a tensor's, computed in fp32.
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {"negative_exp": lambda x: -x.exp()}


def execute(
    transfers: Sequence[Transfer],
    rank: int,
    group: ProcessGroup | None,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    timeout: timedelta = timedelta(minutes=10),
) -> None:
    """Carries out this rank's part of a plan; ranks are those of ``group``, and every rank calls it.

    Args:
        source: local tensor name -> tensor, for what this rank sends.
        target: local tensor name -> tensor, for what this rank receives; written in place.
        dtypes: of every Hugging Face tensor; both sides hold it so, nothing is converted on the way.
        timeout: for each message.

    Every rank takes its messages in one global order, WINDOW at a time: the first that is not through has both its
    ends at it, so that no ranks can wait for each other in a circle.

    Raises:
        TypeError: a tensor of another dtype, named.
        RuntimeError: from the process group, when a peer is gone or the deadline has passed.
    """
    under_way: deque[Callable[[], None]] = deque()
    for number, bucket in messages(transfers, {name: dtype.itemsize for name, dtype in dtypes.items()}):
        sender, receiver = bucket[0].source, bucket[0].target
        if rank == sender == receiver:
            for t in bucket:
                _write(t, _sent(t, source, dtypes), target, dtypes)
            continue
        if rank not in (sender, receiver):
            continue
        if len(under_way) == WINDOW:
            under_way.popleft()()
        start = _send if rank == sender else _receive
        under_way.append(start(bucket, group, number, source if rank == sender else target, dtypes, timeout))
    while under_way:
        under_way.popleft()()


def _send(bucket, group, number, source, dtypes, timeout) -> Callable[[], None]:
    parts = [_bytes(_sent(t, source, dtypes)) for t in bucket]
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    work = group.send([data], bucket[0].target, number)

    def finish(_keep: Tensor = data) -> None:
        work.wait(timeout)

    return finish


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # one element of a larger tensor counts as contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _receive(bucket, group, number, target, dtypes, timeout) -> Callable[[], None]:
    sizes = [t.box.numel * dtypes[t.tensor].itemsize for t in bucket]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=target[bucket[0].target_local].device)
    work = group.recv([data], bucket[0].source, number)

    def finish() -> None:
        work.wait(timeout)
        for t, part in zip(bucket, data.split(sizes), strict=True):
            # A message packs tensors of several dtypes: a part may start where its own dtype does not.
            dtype = dtypes[t.tensor]
            aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
            _write(t, aligned.view(dtype).view(t.box.shape), target, dtypes)

    return finish


def _sent(t: Transfer, source: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Tensor:
    return _view(source, t.source_local, t, dtypes)[t.source_box.slices]


def _write(t: Transfer, value: Tensor, target: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    if t.transform is not None:
        value = TRANSFORMS[t.transform](value.float())
    _view(target, t.target_local, t, dtypes)[t.target_box.slices].copy_(value)


def _view(tensors: Mapping[str, Tensor], name: str, t: Transfer, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    tensor = tensors[name]
    if tensor.dtype != dtypes[t.tensor]:
        raise TypeError(f"{name} is {tensor.dtype}, but the transfer carries {dtypes[t.tensor]}")
    return tensor.detach()
