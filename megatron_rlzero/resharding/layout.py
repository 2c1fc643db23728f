"""A layout says which boxes of which Hugging Face tensor every rank holds, and where in its own memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import sub
from typing import NamedTuple


class Box(NamedTuple):
    """A half-open hyper-rectangle: ``start[d] <= index[d] < stop[d]`` in every dimension ``d``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """The box of a full tensor of ``shape``."""
        shape = tuple(shape)
        return Box((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return prod(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from a tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def shift(self, offset: Iterable[int]) -> Box:
        """This box moved by ``offset`` in every dimension."""
        offset = tuple(offset)
        move = lambda corner: tuple(c + o for c, o in zip(corner, offset, strict=True))  # noqa: E731
        return Box(move(self.start), move(self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where the two do not overlap."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, other: Box) -> Iterator[Box]:
        """Disjoint boxes that cover ``self`` without ``other``; ``other`` must lie inside ``self``."""
        start, stop = list(self.start), list(self.stop)
        for d in range(len(start)):
            if start[d] < other.start[d]:
                yield Box(tuple(start), (*stop[:d], other.start[d], *stop[d + 1 :]))
            if other.stop[d] < stop[d]:
                yield Box((*start[:d], other.stop[d], *start[d + 1 :]), tuple(stop))
            start[d], stop[d] = other.start[d], other.stop[d]


class Piece(NamedTuple):
    """``box`` of the Hugging Face tensor ``tensor`` lies at ``local_box`` of the rank's own tensor ``local``.

    Both boxes have the same shape. ``transform`` names the elementwise function, one of transport.TRANSFORMS, of which
    the rank keeps the values; such a piece can be written and not read.
    """

    tensor: str
    box: Box
    local: str
    local_box: Box
    transform: str | None = None


#: rank -> the pieces it holds
Layout = dict[int, list[Piece]]


def whole_tensors(shapes: dict[str, tuple[int, ...]]) -> list[Piece]:
    """The pieces of a rank that holds every tensor whole, under its Hugging Face name."""
    return [Piece(name, Box.whole(shape), name, Box.whole(shape)) for name, shape in shapes.items()]


def overlapping(pieces: Iterable[Piece]) -> tuple[Piece, Piece] | None:
    """Two pieces that would write the same element of a local tensor, if there are any."""
    by_local: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_local.setdefault(piece.local, []).append(piece)
    for group in by_local.values():
        if len(group) == 1:
            continue
        group.sort(key=lambda piece: piece.local_box)
        for i, piece in enumerate(group):
            for other in group[i + 1 :]:
                if other.local_box.start[0] >= piece.local_box.stop[0]:
                    break
                if piece.local_box.intersect(other.local_box) is not None:
                    return piece, other
    return None
