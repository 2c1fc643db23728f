"""One pure function plans every change of layout: who sends which box of which tensor to whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_rlzero.resharding.layout import Box, Layout, Piece, overlapping


class Transfer(NamedTuple):
    """``tensor[box]`` goes from ``source_box`` of the source's ``source_local`` to the target's tensor."""

    source: int
    target: int
    tensor: str
    box: Box
    source_local: str
    source_box: Box
    target_local: str
    target_box: Box
    transform: str | None = None


#: tensor -> box -> the ranks that hold it, and as which piece
Holders = dict[str, dict[Box, list[tuple[int, Piece]]]]


def plan(source: Layout, target: Layout) -> list[Transfer]:
    """Transfers that write every element of every target piece exactly once.

    Where several source ranks hold the same elements, the one with the fewest elements to send so far is
    taken, its own copy first of all; ties go to the lowest rank. The result depends on the arguments alone.

    Raises:
        ValueError: names the tensor and the box that no source rank holds, that two pieces of a target rank would
            write to the same place, or that a source holds transformed.
    """
    holders = _holders(source)
    sent = dict.fromkeys(source, 0)
    transfers: list[Transfer] = []
    for rank in sorted(target):
        if twice := overlapping(target[rank]):
            one, other = twice
            raise ValueError(
                f"target rank {rank} would write {one.tensor}{_text(one.box)} and {other.tensor}{_text(other.box)} to "
                f"the same elements of {one.local}"
            )
        for piece in target[rank]:
            boxes = holders.get(piece.tensor, {})
            missing = [piece.box]
            # The same box on both sides is the rule, and quick; else those at hand first, then the idlest rank's.
            same = piece.box in boxes and rank not in source
            for held in [piece.box] if same else _by_load(boxes, rank, sent):
                missing = _take(missing, held, boxes[held], piece, rank, sent, transfers)
                if not missing:
                    break
            if missing:
                raise ValueError(
                    f"no source rank holds {piece.tensor}{_text(missing[0])}, which target rank {rank} needs for "
                    f"{piece.local}"
                )
    return transfers


def _holders(source: Layout) -> Holders:
    holders: Holders = {}
    for rank in sorted(source):
        for piece in source[rank]:
            if piece.transform is not None:
                raise ValueError(
                    f"source rank {rank} keeps {piece.transform} of {piece.tensor}{_text(piece.box)}: it cannot be sent"
                )
            holders.setdefault(piece.tensor, {}).setdefault(piece.box, []).append((rank, piece))
    return holders


def _by_load(boxes: Iterable[Box], rank: int, sent: dict[int, int]) -> list[Box]:
    idlest = {box: _cost(_choose(held, rank, sent)[0], rank, sent) for box, held in boxes.items()}
    return sorted(boxes, key=lambda box: (idlest[box], box))


def _choose(held: list[tuple[int, Piece]], rank: int, sent: dict[int, int]) -> tuple[int, Piece]:
    return held[0] if len(held) == 1 else min(held, key=lambda h: _cost(h[0], rank, sent))


def _cost(holder: int, rank: int, sent: dict[int, int]) -> tuple[bool, int, int]:
    return holder != rank, sent[holder], holder


def _take(
    missing: list[Box],
    held: Box,
    candidates: list[tuple[int, Piece]],
    piece: Piece,
    rank: int,
    sent: dict[int, int],
    transfers: list[Transfer],
) -> list[Box]:
    """Adds the transfers for what ``held`` and ``missing`` have in common; returns what is still missing."""
    still_missing = []
    for box in missing:
        common = box if box == held else box.intersect(held)
        if common is None:
            still_missing.append(box)
            continue
        if common is not box:
            still_missing.extend(box.subtract(common))
        holder, source = _choose(candidates, rank, sent)
        transfers.append(
            Transfer(
                holder,
                rank,
                piece.tensor,
                common,
                source.local,
                _inside(common, source),
                piece.local,
                _inside(common, piece),
                piece.transform,
            )
        )
        if holder != rank:
            sent[holder] += common.numel
    return still_missing


def _inside(box: Box, piece: Piece) -> Box:
    """Where ``box`` of the tensor lies in the piece's local tensor."""
    if box == piece.box:
        return piece.local_box
    return box.shift(b - a for a, b in zip(piece.box.start, piece.local_box.start, strict=True))


def _text(box: Box) -> str:
    return f"{list(box.start)}:{list(box.stop)}"
