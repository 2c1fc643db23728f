"""One pure function plans every change of layout: who sends which box of which tensor to whom."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_rlzero.resharding.layout import Box, Layout, Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """``tensor[box]`` goes from ``source_box`` of the source's ``source_local`` to the target's tensor."""

    source: int
    target: int
    tensor: str
    box: Box
    source_local: str
    source_box: Box
    target_local: str
    target_box: Box


def plan(source: Layout, target: Layout) -> list[Transfer]:
    """Transfers that write every element of every target piece exactly once.

    Where several source ranks hold the same elements, the one with the fewest elements to send so far is
    taken, its own copy first of all; ties go to the lowest rank. The result depends on the arguments alone.

    Raises:
        ValueError: names the tensor and the box that no source rank holds.
    """
    holders: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank in sorted(source):
        for piece in source[rank]:
            holders[piece.tensor].append((rank, piece))
    sent: dict[int, int] = dict.fromkeys(source, 0)
    transfers = []
    for rank in sorted(target):
        for piece in target[rank]:
            missing = [piece.box]
            by_load = sorted(holders[piece.tensor], key=lambda h: (h[0] != rank, sent[h[0]], h[0]))
            for holder, held in by_load:
                still_missing = []
                for box in missing:
                    common = box.intersect(held.box)
                    if common is None:
                        still_missing.append(box)
                        continue
                    still_missing.extend(box.subtract(common))
                    transfers.append(
                        Transfer(
                            holder,
                            rank,
                            piece.tensor,
                            common,
                            held.local,
                            _inside(common, held),
                            piece.local,
                            _inside(common, piece),
                        )
                    )
                    sent[holder] += common.numel if holder != rank else 0
                missing = still_missing
                if not missing:
                    break
            if missing:
                raise ValueError(
                    f"no source rank holds {piece.tensor}{list(missing[0].start)}:{list(missing[0].stop)}, "
                    f"which target rank {rank} needs for {piece.local}"
                )
    return transfers


def _inside(box: Box, piece: Piece) -> Box:
    """Where ``box`` of the tensor lies in the piece's local tensor."""
    return box.shift(b - a for a, b in zip(piece.box.start, piece.local_box.start, strict=True))
