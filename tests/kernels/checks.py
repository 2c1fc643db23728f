"""What every operator is asked: right values and gradients against float64, and bits that no neighbour changes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels.backend import INTERPRETED
from tools.gpu_check.measures import BF16_ROUNDING, FP32_TOLERANCE
from tools.gpu_check.measures import tolerance as tolerance  # for the tests

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
#: Batch sizes on both sides of vector widths and of the row tile; an interpreter is slow, and has no such code paths.
SIZES = (7, 17) if INTERPRETED else (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 50)
THREADS = (1,) if INTERPRETED else (1, 2)


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted element; infinite for a NaN."""
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-300)
    return float(difference.nan_to_num(nan=torch.inf))


def rounded_once(found: Tensor, wanted: Tensor) -> bool:
    """Whether every element is within one rounding to its dtype, and fp32 arithmetic, of the float64 value."""
    wanted = wanted.double()
    once = BF16_ROUNDING if found.dtype == BF16 else 0.0
    allowed = once * wanted.abs() + FP32_TOLERANCE * wanted.abs().max()
    return bool(((found.double() - wanted).abs() <= allowed).all())


def with_gradients(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """(f(*inputs), gradient of every input) for one fixed random cotangent, whatever the dtype."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gradients = torch.autograd.grad(out, inputs, cotangent.to(torch.bfloat16).to(out.dtype))
    return out.detach(), *gradients


def errors(f: Callable[..., Tensor], oracle: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[float]:
    """Error of the value and of every gradient against ``oracle`` at the same inputs in float64."""
    found, wanted = with_gradients(f, inputs), with_gradients(oracle, [x.double() for x in inputs])
    return [error(a, b) for a, b in zip(found, wanted, strict=True)]


def dependent_rows(f: Callable[[Tensor], Tensor], x: Tensor, nan: bool = True) -> list[str]:
    """Where the bits of a row of f(x) depend on the batch; empty if the operator is batch invariant.

    Compares the first ``n`` rows alone, single rows, a window, and all rows with the other rows replaced by noise and,
    with ``nan``, by NaN, on one thread and on two, with the rows of the whole batch on one thread.
    """
    torch.set_num_threads(1)
    wanted, found = f(x), []
    assert wanted.isfinite().all()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(8)).to(x.dtype) * 10
    middle = len(x) // 2
    for threads in THREADS:
        torch.set_num_threads(threads)
        for n in (n for n in SIZES if n <= len(x)):
            if not torch.equal(f(x[:n]), wanted[:n]):
                found.append(f"first {n} rows, {threads} threads")
        for i in (0, middle) if INTERPRETED else (0, 1, middle, len(x) - 1):
            if not torch.equal(f(x[i : i + 1]), wanted[i : i + 1]):
                found.append(f"row {i} alone, {threads} threads")
        if not torch.equal(f(x[middle - 4 : middle + 7]), wanted[middle - 4 : middle + 7]):
            found.append(f"window, {threads} threads")
        others = (noise, torch.full_like(x, torch.nan))[: 1 + nan]
        for other in others[-1:] if INTERPRETED else others:
            changed = other.clone()
            changed[middle] = x[middle]
            if not torch.equal(f(changed)[middle], wanted[middle]):
                found.append(f"other rows changed, {threads} threads")
    return found
