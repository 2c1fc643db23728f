"""Bits of packed documents: of each alone, in another order of the pack, and among documents of NaN."""

from typing import Any

import torch
from torch import Tensor

from tools.gpu_check.measures import BF16, Comparison, poisoned
from tools.gpu_check.sequences import Packed
from tools.gpu_check.sizes import DEVICE


def check(packed: Packed) -> list[dict[str, Any]]:
    """Values and gradients of what belongs to tokens; the control is documents that begin elsewhere."""
    with poisoned():
        lengths, inputs = list(packed.lengths), list(packed.inputs)
        shape = packed.call(*inputs, lengths).shape
        noise = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
        cotangent = noise.to(BF16).to(inputs[0].dtype)
        wanted = _gradients(packed, inputs, lengths, cotangent)
        alone, control, start = Comparison(), Comparison(), 0
        for i, length in enumerate(lengths):
            rows = slice(start, start + length)
            start += length
            found = _gradients(packed, _rows(packed, inputs, rows), [length], cotangent[rows])
            for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
                alone(f"{f'gradient {k}' if k else 'value'} of document {i}, {length} tokens", a, b[rows])
        merged = [lengths[0] + lengths[1], *lengths[2:]]
        for a, b in zip(_gradients(packed, inputs, merged, cotangent), wanted, strict=True):
            control("merged", a, b)
        checks = [alone.result("packed documents alone", control.differing)]
        elsewhere = _elsewhere(packed, inputs, lengths, wanted[0])
        return [*checks, elsewhere.result("documents elsewhere in the pack", control.differing)]


def _elsewhere(packed: Packed, inputs: list[Tensor], lengths: list[int], wanted: Tensor) -> Comparison:
    compare, parts = Comparison(), wanted.split(lengths)
    order = list(range(1, len(lengths), 2)) + list(range(0, len(lengths), 2))
    places = torch.cat([torch.arange(sum(lengths), device=DEVICE).split(lengths)[i] for i in order])
    found = packed.call(*_rows(packed, inputs, places), [lengths[i] for i in order])
    compare("another order", found, torch.cat([parts[i] for i in order]))
    for kept in range(len(lengths)):
        rows = torch.zeros(sum(lengths), dtype=torch.bool, device=DEVICE)
        rows[sum(lengths[:kept]) : sum(lengths[: kept + 1])] = True
        spoiled = list(inputs)
        for i in packed.tokens:
            mask = rows.view(-1, *[1] * (inputs[i].dim() - 1))
            spoiled[i] = torch.where(mask, inputs[i], torch.nan)
        compare(f"document {kept} among NaN", packed.call(*spoiled, lengths)[rows], parts[kept])
    return compare


def _rows(packed: Packed, inputs: list[Tensor], rows: slice | Tensor) -> list[Tensor]:
    return [x[rows] if i in packed.tokens else x for i, x in enumerate(inputs)]


def _gradients(packed: Packed, inputs: list[Tensor], lengths: list[int], cotangent: Tensor) -> list[Tensor]:
    """The value, and the gradients of what belongs to tokens."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = packed.call(*leaves, lengths)
    return [out.detach(), *torch.autograd.grad(out, [leaves[i] for i in packed.tokens], cotangent)]
