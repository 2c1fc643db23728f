"""Norms in Triton: a row of a group lies whole in a program, whose sum over it is one reduction of a fixed shape."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.activation.triton import sigmoid
from megatron_rlzero.kernels.reduction.triton import neighbours

#: elements of the rows that one program takes together, where rows are short
ELEMENTS = 4096
#: columns of a program that adds up a weight's gradient
COLUMNS = 64


@triton.jit
def _gated(x, gate, GATED: tl.constexpr):
    return x * (gate / (1.0 + tl.exp(-gate))) if GATED else x


@triton.jit(do_not_specialize=["count"])
def _norm(
    x, gate, weight, out, scale, count, groups, width, eps,
    x_token, x_group, gate_token, gate_group, weight_group,
    GATED: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    token, group = (row // groups).to(tl.int64), row % groups
    inside = (row[:, None] < count) & (at[None, :] < width)
    z = tl.load(x + (token * x_token + group * x_group)[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        beside = gate + (token * gate_token + group * gate_group)[:, None] + at[None, :]
        z = _gated(z, tl.load(beside, mask=inside, other=0.0).to(tl.float32), GATED)
    mean = tl.div_rn(tl.sum(z * z, axis=1), width.to(tl.float32))
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    w = tl.load(weight + (group * weight_group)[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    value = gpu.rounded(z * factor[:, None] * w, out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * width + at[None, :], value, mask=inside)
    tl.store(scale + row, factor, mask=row < count)


@triton.jit(do_not_specialize=["count"])
def _gradient(
    x, gate, weight, scale, grad, to_x, to_gate, count, groups, width,
    x_token, x_group, gate_token, gate_group, grad_token, grad_group, weight_group,
    GATED: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    token, group = (row // groups).to(tl.int64), row % groups
    inside = (row[:, None] < count) & (at[None, :] < width)
    wide = tl.load(x + (token * x_token + group * x_group)[:, None] + at[None, :], mask=inside, other=0.0)
    wide = wide.to(tl.float32)
    z = wide
    if GATED:
        beside = gate + (token * gate_token + group * gate_group)[:, None] + at[None, :]
        wide_gate = tl.load(beside, mask=inside, other=0.0).to(tl.float32)
        z = _gated(wide, wide_gate, GATED)
    factor = tl.load(scale + row, mask=row < count, other=0.0)[:, None]
    g = tl.load(grad + (token * grad_token + group * grad_group)[:, None] + at[None, :], mask=inside, other=0.0)
    w = tl.load(weight + (group * weight_group)[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    weighted, normed = g.to(tl.float32) * w, z * factor
    inner = tl.div_rn(tl.sum(weighted * normed, axis=1), width.to(tl.float32))
    to_z = factor * (weighted - normed * inner[:, None])
    to = row.to(tl.int64)[:, None] * width + at[None, :]
    if GATED:
        share = sigmoid(wide_gate)
        value = to_z * wide * share * (1.0 + wide_gate * (1.0 - share))
        tl.store(to_gate + to, gpu.rounded(value, to_gate.dtype.element_ty), mask=inside)
        to_z = to_z * wide_gate * share
    tl.store(to_x + to, gpu.rounded(to_z, to_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _weight_gradient(
    x, gate, scale, grad, out, tokens, groups, width,
    x_token, x_group, gate_token, gate_group, grad_token, grad_group,
    GATED: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    chunk, group = tl.program_id(0), tl.program_id(1)
    token = chunk.to(tl.int64) * (1 << LEVELS) + tl.arange(0, 1 << LEVELS)
    at = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    inside = (token[:, None] < tokens) & (at[None, :] < width)
    z = tl.load(x + (token * x_token + group * x_group)[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    if GATED:
        beside = gate + (token * gate_token + group * gate_group)[:, None] + at[None, :]
        z = _gated(z, tl.load(beside, mask=inside, other=0.0).to(tl.float32), GATED)
    factor = tl.load(scale + token * groups + group, mask=token < tokens, other=0.0)[:, None]
    g = tl.load(grad + (token * grad_token + group * grad_group)[:, None] + at[None, :], mask=inside, other=0.0)
    total = neighbours(g.to(tl.float32) * (z * factor), LEVELS)
    tl.store(out + (chunk.to(tl.int64) * groups + group) * width + at, total, mask=at < width)


def norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.norm``."""
    x, gate, weight = _side_by_side(x), _side_by_side(gate), weight.contiguous()
    (tokens, groups, width), beside = x.shape, x if gate is None else gate
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale = torch.empty(tokens, groups, 1, dtype=torch.float32, device=x.device)
    if out.numel():
        grid, constants = _shape(tokens * groups, width, gate)
        strides = (*x.stride()[:2], *beside.stride()[:2], _by_group(weight, width))
        sizes = (tokens * groups, groups, width, eps)
        _norm[grid](x, beside, weight, out, scale, *sizes, *strides, **constants, **_options(x))
    return out, scale


def gradients(
    x: Tensor, gate: Tensor | None, weight: Tensor, scale: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """See ``reference.gradients``."""
    x, gate, grad, weight = _side_by_side(x), _side_by_side(gate), _side_by_side(grad), weight.contiguous()
    (tokens, groups, width), beside = x.shape, x if gate is None else gate
    to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    chunks = torch.empty(triton.cdiv(tokens, tiles.ROWS), groups, width, dtype=torch.float32, device=x.device)
    if to_x.numel():
        grid, constants = _shape(tokens * groups, width, gate)
        strides = (*x.stride()[:2], *beside.stride()[:2], *grad.stride()[:2])
        results = (to_x, to_x if to_gate is None else to_gate)
        sizes = (tokens * groups, groups, width)
        _gradient[grid](
            x, beside, weight, scale, grad, *results, *sizes, *strides, _by_group(weight, width),
            **constants, **_options(x),
        )  # fmt: skip
        grid = (len(chunks), groups, triton.cdiv(width, COLUMNS))
        constants = {"GATED": gate is not None, "LEVELS": tiles.ROWS.bit_length() - 1, "SIZE": COLUMNS}
        sizes = (tokens, groups, width)
        _weight_gradient[grid](x, beside, scale, grad, chunks, *sizes, *strides, **constants, **_options(x))
    return to_x, to_gate, chunks


def _side_by_side(x: Tensor | None) -> Tensor | None:
    """``x`` with the elements of a row side by side."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _by_group(weight: Tensor, width: int) -> int:
    """Elements from one group's weight to the next one's."""
    return 0 if len(weight) == width else width


def _shape(rows: int, width: int, gate: Tensor | None) -> tuple[tuple[int], dict[str, int]]:
    """Grid and constants: the rows of a program depend on the width alone."""
    size = triton.next_power_of_2(width)
    together = max(min(16, ELEMENTS // size), 1)
    return (triton.cdiv(rows, together),), {"GATED": gate is not None, "ROWS": together, "SIZE": size}


def _options(x: Tensor) -> dict[str, int | bool]:
    return gpu.options(tiles.gpu(x.device).row)
