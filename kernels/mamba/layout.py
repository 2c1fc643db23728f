"""The order in which a scan takes chunks: batches of documents and steps; it bounds memory and changes no bit."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba.buffers import Buffers

#: Elements of the states of a batch's documents, unless it is a single one.
MOVED = 2**16
#: Elements of the states of a segment's chunks, and the steps that it has at least.
HELD, STEPS = 2**19, 8


@dataclass(frozen=True)
class Segment:
    """Chunks of successive steps; in a step every document of the batch that goes on moves over one chunk.

    Attributes:
        rows: int64 [chunks, tiles.CHUNK], tokens; beyond a document's end its last token again.
        padding: bool [chunks, tiles.CHUNK, 1], True beyond the end.
        real: int64 [n], the places of ``rows`` that are not padding; None if all are.
        span: the slice of tokens that ``rows`` are; None if they are not one.
        counts: chunks of each step, those of longer documents first; whole: how many of them, the first ones, have no
            padding; going: how many of their documents, the first ones, go on behind the step.
    """

    rows: Tensor
    padding: Tensor
    real: Tensor | None
    span: slice | None
    counts: tuple[int, ...]
    whole: tuple[int, ...]
    going: tuple[int, ...]

    def take(self, x: Tensor, held: Buffers, name: str) -> Tensor:
        """Tokens of x [tokens, groups, ...] as fp32 [chunks, groups, tiles.CHUNK, ...], a view of x or not."""
        taken = x[self.span] if self.span else x.index_select(0, self.rows.flatten())
        taken = taken.unflatten(0, self.rows.shape).transpose(1, 2)
        return taken if taken.dtype == torch.float32 else held(name, *taken.shape).copy_(taken)

    def add(self, out: Tensor, y: Tensor, x: Tensor, factor: Tensor) -> None:
        """Writes y + factor x, both [chunks, groups, tiles.CHUNK, ...], as ``place``; y may be overwritten."""
        if self.span and out.dtype == torch.float32:
            torch.addcmul(y, x, factor, out=out[self.span].unflatten(0, self.rows.shape).transpose(1, 2))
        else:
            self.place(out, y.addcmul_(x, factor))

    def place(self, out: Tensor, y: Tensor) -> None:
        """Writes y [chunks, groups, tiles.CHUNK, ...] to the tokens of out [tokens, groups, ...]."""
        y = y.transpose(1, 2)
        if self.span:
            out[self.span].unflatten(0, self.rows.shape).copy_(y)
            return
        y, rows = y.flatten(0, 1).to(out.dtype), self.rows.flatten()
        if self.real is not None:
            y, rows = y[self.real], rows[self.real]
        out.index_copy_(0, rows, y)


@dataclass(frozen=True)
class Batch:
    """Documents ``order``, int64 from the longest one on, whose states move together."""

    order: Tensor
    segments: tuple[Segment, ...]


def together(groups: int, size: int) -> list[slice]:
    """Neighbouring groups whose chunks are taken at once; ``size``: elements of the states of one."""
    n = max(n for n in range(1, groups + 1) if not groups % n and (n == 1 or n * size * STEPS <= HELD))
    return [slice(first, first + n) for first in range(0, groups, n)]


def batches(lengths: list[int], size: int, device: torch.device) -> tuple[Batch, ...]:
    """``size``: elements of a document's state."""
    return _batches(tuple(lengths), size, device, tiles.CHUNK, MOVED, HELD)


@lru_cache(maxsize=32)
def _batches(
    lengths: tuple[int, ...], size: int, device: torch.device, c: int, moved: int, held: int
) -> tuple[Batch, ...]:
    length = torch.tensor(lengths, device=device)
    start, order = length.cumsum(0) - length, torch.sort(length, descending=True, stable=True).indices
    many = max(moved // size, 1)
    return tuple(Batch(part, _segments(start[part], length[part], size, c, held)) for part in order.split(many))


def _segments(start: Tensor, length: Tensor, size: int, c: int, held: int) -> tuple[Segment, ...]:
    device = start.device
    first = torch.arange(0, int(length[0]), c, device=device)
    counts = (first[:, None] < length).sum(1).tolist()
    found, step = [], 0
    while step < len(counts):
        end = step + 1
        while end < len(counts) and (end - step < STEPS or sum(counts[step : end + 1]) * size <= held):
            end += 1
        part = counts[step:end]
        document = torch.cat([torch.arange(count, device=device) for count in part])
        chunk = torch.repeat_interleave(torch.arange(step, end, device=device), torch.tensor(part, device=device))
        position, stop = chunk[:, None] * c + torch.arange(c, device=device), length[document][:, None]
        rows, padding = start[document][:, None] + torch.minimum(position, stop - 1), position >= stop
        real = (~padding.flatten()).nonzero()[:, 0] if padding.any() else None
        begin, number = int(rows[0, 0]), rows.numel()
        successive = torch.equal(rows.flatten(), torch.arange(begin, begin + number, device=device))
        span = slice(begin, begin + number) if successive else None
        ends = [(step + i + 1) * c for i in range(len(part))]
        whole = tuple(int((length >= end).sum()) for end in ends)
        going = tuple(int((length > end).sum()) for end in ends)
        found.append(Segment(rows, padding[..., None], real, span, tuple(part), whole, going))
        step = end
    return tuple(found)
