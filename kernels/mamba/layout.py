"""The order in which a scan takes chunks: batches of documents and steps; it bounds memory and changes no bit."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles

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
        counts: chunks of each step, those of longer documents first.
        ends: int64 [n], the documents of the batch that end here; last: int64 [n], their last chunks; partial: bool
            [n, 1, 1, 1], whether those are not whole.
    """

    rows: Tensor
    padding: Tensor
    real: Tensor | None
    span: slice | None
    counts: tuple[int, ...]
    ends: Tensor
    last: Tensor
    partial: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Tokens of x [tokens, ...] as [chunks, tiles.CHUNK, ...], a view or not."""
        taken = x[self.span] if self.span else x.index_select(0, self.rows.flatten())
        return taken.unflatten(0, self.rows.shape)

    def place(self, out: Tensor, y: Tensor) -> None:
        """Writes y [chunks, tiles.CHUNK, ...] to the tokens of out [tokens, ...]."""
        y, rows = y.flatten(0, 1).to(out.dtype), self.rows.flatten()
        if self.span:
            out[self.span] = y
            return
        if self.real is not None:
            y, rows = y[self.real], rows[self.real]
        out.index_copy_(0, rows, y)


@dataclass(frozen=True)
class Batch:
    """Documents ``order``, int64 from the longest one on, whose states move together."""

    order: Tensor
    segments: tuple[Segment, ...]


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
        last = (position[:, -1] >= stop[:, 0] - 1).nonzero()[:, 0]
        real = (~padding.flatten()).nonzero()[:, 0] if padding.any() else None
        partial = padding[last, -1, None, None, None]
        first, number = int(rows[0, 0]), rows.numel()
        whole = torch.equal(rows.flatten(), torch.arange(first, first + number, device=device))
        span = slice(first, first + number) if whole else None
        found.append(Segment(rows, padding[..., None], real, span, tuple(part), document[last], last, partial))
        step = end
    return tuple(found)
