"""What is measured: the largest relative error against float64, and in how many comparisons bits differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tools.gpu_check.sizes import BF16, DEVICE

#: Largest error, relative to the largest element, of fp32 arithmetic; and of one rounding to bf16.
FP32_TOLERANCE, BF16_ROUNDING = 1e-5, 2.0**-8
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tolerance(dtype: torch.dtype, roundings: int = 1) -> float:
    """Relative to the largest element: fp32 arithmetic, and ``roundings`` to bf16 where tensors have it."""
    return FP32_TOLERANCE + (roundings * BF16_ROUNDING if dtype == BF16 else 0.0)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted element; infinite for a NaN or another shape."""
    if found.shape != wanted.shape:
        return float("inf")
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=torch.inf))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and bits are equal; 0 and -0 are not."""
    kind = BITS[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing was written to holds NaN within it.

    Raises:
        RuntimeError: it does not.
    """
    torch.use_deterministic_algorithms(True)
    try:
        if not (torch.utils.deterministic.fill_uninitialized_memory and torch.empty(999, device=DEVICE).isnan().all()):
            raise RuntimeError("torch.empty does not hold NaN with deterministic algorithms: nothing would be checked")
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_gradients(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], lay: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, ...]:
    """call(*inputs), and the gradient of every input that is a number, for one fixed cotangent, whatever the dtype.

    ``lay``: puts inputs and cotangent into memory in another way.
    """
    leaves = [lay(x).detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = call(*leaves)
    noise = torch.randn(out.shape, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    cotangent = lay(noise.to(BF16).to(out.dtype))
    gradients = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], cotangent)
    return out.detach(), *gradients


class Comparison:
    """Counts comparisons of bits, and keeps what the first ones that differ were called."""

    def __init__(self) -> None:
        self.compared, self.differing, self.first = 0, 0, list[str]()

    def __call__(self, label: str, found: Tensor, wanted: Tensor) -> None:
        self.compared += 1
        if not same(found, wanted):
            self.differing += 1
            if len(self.first) < 5:
                self.first.append(label)

    def result(self, what: str, control: int) -> dict[str, Any]:
        """A check that passes if no bits differ, and if the negative control was noticed.

        Args:
            control: in how many comparisons what must differ did so.
        """
        passed = self.differing == 0 and self.compared > 0 and control > 0
        return {**self.beside(what), "ok": passed, "control": control}

    def beside(self, what: str) -> dict[str, Any]:
        """The numbers alone, of another implementation: no check."""
        found = {"compared": self.compared, "differing": self.differing, "first": self.first}
        return {"what": what, "ok": None, **found, "control": ""}
