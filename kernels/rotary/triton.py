"""The rotation in Triton: one program per token, all heads at a time; the gradient is the rotation back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles


@triton.jit
def _rotate(
    x, table, positions, out, heads, half, x_token, x_head, out_token, out_head,
    BACK: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    angle = table + tl.load(positions + token).to(tl.int64) * 2 * half + at
    cos = tl.load(angle, mask=at < half, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=at < half, other=0.0)[None, :]
    if BACK:
        sin = -sin
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head[:, None] < heads) & (at[None, :] < half)
        source = x + token * x_token + head[:, None] * x_head + at[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        target = out + token * out_token + head[:, None] * out_head + at[None, :]
        tl.store(target, gpu.rounded(first * cos - second * sin, out.dtype.element_ty), mask=inside)
        tl.store(target + half, gpu.rounded(second * cos + first * sin, out.dtype.element_ty), mask=inside)


def rotate(x: Tensor, table: Tensor, positions: Tensor, back: bool) -> Tensor:
    """``dispatch.apply_rotary``, or its gradient at ``x`` if ``back``."""
    x, positions = x if x.stride(-1) == 1 else x.contiguous(), positions.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (tokens, heads, dim), tile = x.shape, tiles.gpu(x.device).row
    if out.numel():
        sizes = (heads, dim // 2, *x.stride()[:2], *out.stride()[:2])
        constants = {"BACK": back, "HEADS": tile.m, "SIZE": triton.next_power_of_2(dim // 2)}
        _rotate[(tokens,)](x, table, positions, out, *sizes, **constants, **gpu.options(tile))
    return out
