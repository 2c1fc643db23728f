"""Times of an operator, forward and backward, beside torch's own, and the bytes and FLOPs that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tools.gpu_check import clock


@dataclass(frozen=True)
class Timed:
    """One operator at one size.

    Attributes:
        call, inputs: ours; torchs: name, call and inputs of torch's, if it has one.
        flops: of the forward pass; those of the backward pass are ``back`` times as many.
        moved: bytes, where they are not those of all inputs and of the result.
        differentiable: whether the backward pass is taken too.
    """

    call: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    torchs: tuple[str, Callable[..., Tensor], Sequence[Tensor]] | None = None
    flops: float = 0.0
    back: float = 2.0
    moved: int | None = None
    differentiable: bool = True


def measure(make: Callable[[], Timed]) -> list[dict[str, Any]]:
    """One entry for forward and one for backward; what goes wrong in the library is told there."""
    timed, found = make(), []
    with torch.no_grad():
        out = timed.call(*timed.inputs)
    size, given = sum(map(_bytes, timed.inputs)), sum(_bytes(x) for x in timed.inputs if x.is_floating_point())
    passes = [("forward", clock.forward, timed.flops, timed.moved or size + _bytes(out))]
    if timed.differentiable:
        passes.append(("backward", clock.backward, timed.back * timed.flops, size + _bytes(out) + given))
    del out
    for what, clocked, flops, moved in passes:
        entry = {"what": what, "ok": None, "flops": flops, "bytes": moved, **clocked(timed.call, timed.inputs)}
        if timed.torchs:
            name, call, inputs = timed.torchs
            try:
                entry["library"] = {"name": name, **clocked(call, inputs)}
            except RuntimeError as wrong:  # of another project's code: no reason to lose our own time
                entry["library"] = {"name": name, "error": str(wrong)}
        found.append(entry)
    return found


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
