"""Assembles tensors from boxes of other tensors in blocks of rows: one is read, checked and written while cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from operator import sub
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.plan import Transfer

#: bytes of a block
BLOCK = 2**22
#: Some threads read and check while others wait for the disk, which is quicker with several requests at hand.
WORKERS = 8
#: tensors of the source that are kept open, since several targets may take from one
OPEN = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Target(NamedTuple):
    """A tensor to assemble; what no transfer covers becomes zero."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transfers: Sequence[Transfer]

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape, leading axes folded into the first one where the transfers' boxes have fewer axes."""
        fold = len(self.shape) - len(self.transfers[0].target_box.start) + 1 if self.transfers else 1
        return prod(self.shape[:fold]), *self.shape[fold:]


def stream(
    targets: Sequence[Target],
    read: Callable[[str], Tensor],
    check: Callable[[Transfer, Tensor], None],
    write: Callable[[Target, Box, Tensor], None],
) -> None:
    """Assembles the targets, several at a time; each of WORKERS has memory for one block, or row if that is larger.

    All three functions are called in threads, and what they raise ends the others too.

    Args:
        read: a tensor of the source, mapped; its leading axes are folded where a transfer's box has fewer.
        check: is given every value once, raises for those that must not be written.
        write: is given blocks of whole rows (of Target.rows), which are good until it returns.
    """
    waiting: SimpleQueue[Target] = SimpleQueue()
    for target in targets:
        waiting.put(target)
    read = lru_cache(OPEN)(read)
    stopped = False

    def work() -> None:
        nonlocal stopped
        buffer = torch.empty(BLOCK, dtype=torch.uint8)
        try:
            while not stopped:
                target = waiting.get_nowait()
                size = prod(target.rows[1:]) * target.dtype.itemsize
                if len(buffer) < size:
                    buffer = torch.empty(size, dtype=torch.uint8)
                for box in _blocks(target.rows, max(BLOCK // size, 1)):
                    if stopped:
                        return
                    block = buffer[: box.numel * target.dtype.itemsize].view(target.dtype).view(box.shape)
                    write(target, box, _assemble(target, box, block, read, check))
        except Empty:
            return
        except BaseException:
            stopped = True
            raise

    with ThreadPoolExecutor(WORKERS) as pool:
        workers = [pool.submit(work) for _ in range(WORKERS)]
        try:
            for worker in workers:
                worker.result()
        finally:
            stopped = True


def view(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor whose leading axes are folded into the box's first one."""
    return tensor.flatten(0, tensor.dim() - len(box.start))[box.slices]


def integers(values: Tensor) -> NDArray:
    """The bits of a tensor as integers: numpy works on them in the calling thread alone, and without the GIL."""
    return values.view(_INTEGERS[values.dtype.itemsize]).numpy()


def _blocks(shape: tuple[int, ...], rows: int) -> Iterator[Box]:
    for row in range(0, shape[0], rows):
        yield Box((row, *(0 for _ in shape[1:])), (min(row + rows, shape[0]), *shape[1:]))


def _assemble(
    target: Target,
    box: Box,
    block: Tensor,
    read: Callable[[str], Tensor],
    check: Callable[[Transfer, Tensor], None],
) -> Tensor:
    """The values of a box of whole rows: the source's own bytes if they lie in one piece, else put into ``block``."""
    into = integers(block)
    parts = [(t, part) for t in target.transfers if (part := t.target_box.intersect(box)) is not None]
    if sum(part.numel for _, part in parts) < box.numel:
        into[...] = 0
    for t, part in parts:
        tensor = read(t.source_local)
        source_box = part.shift(map(sub, t.source_box.start, t.target_box.start))
        values = view(tensor, source_box)
        check(t, values)
        if part == box and values.is_contiguous():
            return values
        np.copyto(into[part.shift(-a for a in box.start).slices], integers(values))
    return block
