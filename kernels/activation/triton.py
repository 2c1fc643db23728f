"""Activations in Triton: elementwise over rows, fp32 inside, rounded once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles

#: elements of a program
BLOCK = 1024


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of an fp32 x; exp overflows below -88, where it is 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul(x, out, width, x_row, out_row, SIZE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + at, mask=at < width, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_row + at, gpu.rounded(value, out.dtype.element_ty), mask=at < width)


@triton.jit
def _silu_and_mul_gradient(x, grad, out, width, x_row, grad_row, out_row, SIZE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    gate = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_row + at, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(gate)
    to_gate, to_up = g * up * share * (1.0 + gate * (1.0 - share)), g * gate * share
    tl.store(out + row * out_row + at, gpu.rounded(to_gate, out.dtype.element_ty), mask=inside)
    tl.store(out + row * out_row + width + at, gpu.rounded(to_up, out.dtype.element_ty), mask=inside)


@triton.jit
def _squared_relu(x, grad, out, width, x_row, grad_row, out_row, GRADIENT: tl.constexpr, SIZE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
    value = tl.where(value < 0.0, 0.0, value)  # NaN stays
    if GRADIENT:
        value = tl.load(grad + row * grad_row + at, mask=at < width, other=0.0).to(tl.float32) * 2.0 * value
    else:
        value = value * value
    tl.store(out + row * out_row + at, gpu.rounded(value, out.dtype.element_ty), mask=at < width)


def silu_and_mul(x: Tensor) -> Tensor:
    """See ``dispatch.silu_and_mul``."""
    rows = gpu.rows(x)
    out = x.new_empty(rows.shape[0], x.shape[-1] // 2)
    _launch(_silu_and_mul, out.shape, rows, out)
    return out.view(*x.shape[:-1], x.shape[-1] // 2)


def silu_and_mul_gradient(x: Tensor, grad: Tensor) -> Tensor:
    rows, grad = gpu.rows(x), gpu.rows(grad)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(_silu_and_mul_gradient, grad.shape, rows, grad, out)
    return out.view(x.shape)


def squared_relu(x: Tensor) -> Tensor:
    """See ``dispatch.squared_relu``."""
    rows = gpu.rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(_squared_relu, out.shape, rows, rows, out, GRADIENT=False)
    return out.view(x.shape)


def squared_relu_gradient(x: Tensor, grad: Tensor) -> Tensor:
    rows, grad = gpu.rows(x), gpu.rows(grad)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(_squared_relu, out.shape, rows, grad, out, GRADIENT=True)
    return out.view(x.shape)


def _launch(kernel: triton.JITFunction, shape: torch.Size, *rows: Tensor, **constants: bool) -> None:
    """``shape``: rows and elements of each that the programs go over."""
    count, width = shape
    if count * width:
        grid = (count, triton.cdiv(width, BLOCK))
        strides = (x.stride(0) for x in rows)
        kernel[grid](*rows, width, *strides, SIZE=BLOCK, **constants, **gpu.options(tiles.gpu(rows[0].device).row))
