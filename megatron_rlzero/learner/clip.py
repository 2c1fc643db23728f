"""Gradient norm and clipping, the same bits under every layout.

The norm is that of the whole gradient under its Hugging Face names: squares are summed in float64 inside canonical
boxes, which no tensor-parallel size cuts, and the boxes' sums by a tree in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.resharding.layout import Layout, Piece


class GradientNorm:
    """Norm of tensors that are laid out like the parameters; the same on every rank.

    Args:
        layout: of the learner's ranks.
        finest: the pieces of the whole model where tensor parallelism cuts finest: the canonical boxes.
    """

    def __init__(self, layout: Layout, finest: list[Piece], rank: int) -> None:
        boxes = sorted({(p.tensor, p.box.start, p.box.stop) for p in finest})
        number = {box: i for i, box in enumerate(boxes)}
        by_tensor: dict[str, list[Piece]] = {}
        for piece in sorted(set(finest), key=lambda p: (p.tensor, p.box.start)):
            by_tensor.setdefault(piece.tensor, []).append(piece)
        owner: dict[int, int] = {}
        mine: dict[int, tuple[str, tuple[slice, ...]]] = {}
        for holder in sorted(layout):
            for piece in layout[holder]:
                for cut in by_tensor[piece.tensor]:
                    if cut.box.intersect(piece.box) is None:
                        continue
                    box = number[(cut.tensor, cut.box.start, cut.box.stop)]
                    if owner.setdefault(box, holder) == holder == rank:
                        offset = (b - a for a, b in zip(piece.box.start, piece.local_box.start, strict=True))
                        mine[box] = (piece.local, cut.box.shift(offset).slices)
        self._boxes, self._mine = len(boxes), mine

    def __call__(self, gradients: Mapping[str, Tensor]) -> float:
        """Square root of the sum of squares of all elements; ``gradients`` has this rank's by local name."""
        sums = torch.zeros(self._boxes, dtype=torch.float64)
        for box, (local, index) in self._mine.items():
            sums[box] = tiles.halving_sum(gradients[local][index].double().square().flatten()).cpu()
        dist.all_reduce(sums)  # every element has one rank that is not zero
        return sqrt(float(tiles.halving_sum(sums)))
