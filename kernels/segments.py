"""Which part of a batch a Triton program works on, found on the device: segments cut into tiles of so many rows.

Segments are the documents of a pack, the new tokens of sequences, or the rows of experts. No program needs to know how
many there are before it runs, so that a launch can lie in a CUDA graph.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad


@triton.jit
def segment_of(bounds, count, index):
    """The segment that holds ``index``: the last one that begins at it or before it; the others there are empty."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(bounds + middle) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


def bounds_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 [segments + 1]: where each segment begins, and at last where they end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def tile_bounds(bounds: Tensor, rows: int) -> Tensor:
    """int32 [segments + 1]: the number of each segment's first tile of ``rows`` rows, and at last that of all tiles."""
    tiles = (bounds.diff() + (rows - 1)) // rows
    return pad(tiles.cumsum(0), (1, 0)).int()


def most_tiles(total: int, segments: int, rows: int) -> int:
    """No fewer than there can be: tiles of ``total`` rows in all; programs beyond the last tile do nothing."""
    return total // rows + min(segments, total)
