"""What a launch moves and computes, and the time below which an H200 could not do it: a calculation, nothing measured.

An operator is a list of launches, in bf16. Of each launch is counted:

- bytes: each tensor that it reads or writes, once, as if it came from memory. What several programs of a launch read,
  caches are taken to hold; what one launch leaves in a cache for the next is not taken into account. Left out are
  tensors of a few numbers per token or per block of ids, among them what torch computes from them.
- matrix: FLOPs of bf16 products on tensor cores; fp32: those of fp32 products, two for a multiply-add. Products are
  made of whole tiles (those of compute capability 9.0), and of a tile everything is counted, padding and masked scores
  too.
- filled: what is left of these FLOPs without padding and masked scores.
- steps: elementwise fp32 operations, roughly. An exponential counts as one, a correctly rounded division as eight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rlzero.kernels import tiles

#: NVIDIA H200 SXM, data sheet: bytes a second of HBM3e, dense bf16 FLOPs and fp32 FLOPs a second
BANDWIDTH, MATRIX, FP32 = 4.8e12, 989e12, 67e12
TILES = tiles.GPUS[90]
#: bytes of an element
BF16, WIDE = 2, 4


@dataclass(frozen=True)
class Launch:
    """One kernel, see above."""

    bytes: float
    matrix: float = 0.0
    fp32: float = 0.0
    filled: float = 0.0
    steps: float = 0.0

    def seconds(self) -> dict[str, float]:
        """What each part of the GPU takes. A step takes a slot that a multiply-add, of two FLOPs, would take."""
        fp32 = (self.fp32 + 2 * self.steps) / FP32
        return {"memory": self.bytes / BANDWIDTH, "matrix units": self.matrix / MATRIX, "fp32 units": fp32}


#: launches of the forward and of the backward pass
Both = tuple[list[Launch], list[Launch]]


@dataclass(frozen=True)
class Cost:
    """Sum over launches that follow each other, each as long as its slowest part takes.

    Attributes:
        filled: share of the FLOPs of products.
        bound: memory | matrix units | fp32 units, in which most of the seconds lie.
    """

    bytes: float
    matrix: float
    fp32: float
    filled: float
    seconds: float
    bound: str

    @property
    def intensity(self) -> float:
        """FLOPs of products, of whole tiles, per byte."""
        return (self.matrix + self.fp32) / self.bytes


def cost(launches: Iterable[Launch]) -> Cost:
    """See ``Cost``."""
    launches, parts = list(launches), dict.fromkeys(Launch(0).seconds(), 0.0)
    for launch in launches:
        taken = launch.seconds()
        slowest = max(taken, key=taken.__getitem__)
        parts[slowest] += taken[slowest]
    total = {name: sum(getattr(launch, name) for launch in launches) for name in ("bytes", "matrix", "fp32", "filled")}
    total["filled"] /= (total["matrix"] + total["fp32"]) or 1.0
    return Cost(**total, seconds=sum(parts.values()), bound=max(parts, key=parts.__getitem__))


def passed(numbers: float, read: float, written: float, steps: float = 0.0) -> Launch:
    """Elementwise: ``read`` and ``written`` bytes, and ``steps``, of each of so many numbers."""
    return Launch(numbers * (read + written), steps=numbers * steps)
