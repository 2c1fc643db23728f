"""Bits of an operator's rows: in every batch, beside any neighbours, from any memory, and once more."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.kernels.backend import INTERPRETED
from tools.gpu_check.case import Call, Operator
from tools.gpu_check.measures import Comparison, poisoned, with_gradients
from tools.gpu_check.sizes import DEVICE

#: batch sizes: on both sides of vectors, rows of a tile (16, 64, 128) and of several tiles
BATCHES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192),
    *(255, 256, 257, 384, 511, 512),
)
#: rows that are taken alone, windows (first row, rows), turns of the whole batch
ALONE = (0, 1, 7, 15, 16, 63, 64, 127, 128, 200, 255, 256, 383, 510, 511)
WINDOWS = tuple((first, rows) for first in (1, 37, 127, 129, 300) for rows in (2, 16, 100))
TURNS = (1, 17, 200)
if INTERPRETED:
    BATCHES, ALONE, WINDOWS, TURNS = (3,), (17,), ((5, 7),), (1,)


def check(operator: Operator) -> list[dict[str, Any]]:
    """The promises of an operator by itself, each with the comparison that must fail."""
    with poisoned():
        checks, call = _memory(operator), operator.bits or operator.call
        if operator.per_row:
            checks.append(_rows(call, operator).result("rows in every batch", _noticed(operator, call)))
    if operator.torchs:
        name, library = operator.torchs
        checks.append(_rows(library, operator).beside(f"rows in every batch, {name}"))
    return checks


def _noticed(operator: Operator, call: Call) -> int:
    """How often it is noticed that smaller batches than the whole one take another call."""
    whole = len(operator.inputs[operator.per_row[0]])
    return _rows(lambda *t: (call if len(t[operator.per_row[0]]) == whole else operator.other)(*t), operator).differing


def _rows(call: Call, operator: Operator) -> Comparison:
    """Rows of the whole batch against the same ones of other batches."""
    inputs, per_row, compare = operator.inputs, operator.per_row, Comparison()
    count = len(inputs[per_row[0]])
    wanted = call(*inputs)
    if not bool(wanted.isfinite().all()):
        raise RuntimeError("a result of finite inputs is not finite")

    def of(rows: slice | Tensor) -> Tensor:
        return call(*(x[rows] if i in per_row else x for i, x in enumerate(inputs)))

    for label, rows in _batches(count):
        compare(label, of(rows), wanted[rows])
    for row in {count // 3} if INTERPRETED else {0, count // 3, count - 1}:
        for what, scale in (("noise", 10.0), ("NaN", torch.nan)):
            spoiled = list(inputs)
            for i in per_row:
                if inputs[i].is_floating_point():
                    spoiled[i] = scale * torch.randn_like(inputs[i])
                    spoiled[i][row] = inputs[i][row]
            compare(f"row {row} among {what}", call(*spoiled)[row], wanted[row])
    return compare


def _batches(count: int) -> Iterator[tuple[str, slice | Tensor]]:
    yield from ((f"first {n}", slice(n)) for n in BATCHES if n <= count)
    yield from ((f"row {row} alone", slice(row, row + 1)) for row in ALONE if row < count)
    yield from ((f"{n} rows from {first} on", slice(first, first + n)) for first, n in WINDOWS if first + n <= count)
    order = torch.arange(count, device=DEVICE)
    yield from ((f"all, turned by {turn}", order.roll(turn)) for turn in TURNS if turn < count)


def _memory(operator: Operator) -> list[dict[str, Any]]:
    """Value and gradients once more, and of inputs that lie in memory in another way."""
    laid: dict[str, Callable[[Tensor], Tensor]] = {
        "runs": lambda x: x.clone(memory_format=torch.preserve_format),
        "odd strides and addresses": odd,
        "columns side by side": turned,
    }
    wanted, checks = _all(operator, operator.inputs), []
    first = next(i for i, x in enumerate(operator.inputs) if x.is_floating_point())
    changed = list(operator.inputs)
    changed[first] = 1.5 * changed[first]
    control = Comparison()
    for i, (found, value) in enumerate(zip(_all(operator, changed), wanted, strict=True)):
        control(str(i), found, value)
    for what, lay in laid.items():
        compare = Comparison()
        for i, (found, value) in enumerate(zip(_all(operator, operator.inputs, lay), wanted, strict=True)):
            compare(f"gradient {i}" if i else "value", found, value)
        checks.append(compare.result(what, control.differing))
    return checks


def _all(operator: Operator, inputs: Sequence[Tensor], lay: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    if operator.differentiable:
        return with_gradients(operator.call, inputs, lay)
    return ((operator.bits or operator.call)(*map(lay, inputs)),)


def odd(x: Tensor) -> Tensor:
    """``x`` in memory whose rows are one element longer, from its second element on: Triton compiles that apart."""
    *rows, width = x.shape
    memory = torch.empty(1 + x.numel() // width * (width + 1), dtype=x.dtype, device=x.device)
    return memory[1:].view(*rows, width + 1)[..., :width].copy_(x)


def turned(x: Tensor) -> Tensor:
    """``x`` with its last dimension but one side by side."""
    return x if x.dim() < 2 else x.transpose(-1, -2).contiguous().transpose(-1, -2)
