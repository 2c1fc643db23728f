"""What all Triton kernels share: dot, rounding, and launches that contract no product with a sum.

Tokens are counted along the first dimension of a grid: the others go up to 65,535 (CUDA C++ Programming Guide).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels.backend import INTERPRETED
from megatron_rlzero.kernels.tiles import Tile

#: programs of a persistent kernel where there is no GPU: under the interpreter
FEW = 3
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, total):
    """total + a b in fp32, without TF32, for a [m, k] and b [k, n].

    The interpreter has no product of bf16, and its library's bits depend on where in a tile a row is: it adds up here.
    """
    if _INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """An fp32 x in ``dtype``, to the nearest, ties to even; the interpreter by itself would cut bits off."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, up, x)
    return x.to(dtype)


def options(tile: Tile) -> dict[str, int | bool]:
    """Keyword arguments of a launch.

    The compiler may otherwise round a product and the sum it goes into together in one kernel, and apart in another.
    """
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}


def programs(tasks: int, device: torch.device) -> int:
    """How many programs of a persistent kernel run; which of them has a task changes no bit."""
    return max(min(tasks, _multiprocessors(device)), 1)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else FEW


def rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n] whose elements lie side by side; a view where that is possible."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
