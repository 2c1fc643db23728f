"""The vocabulary's log-softmax in Triton: one pass over the logits leaves a peak and two sums of every block of ids.

What follows is over the blocks alone, elementwise and by a halving tree: the largest peak, and sums rescaled to it.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.log_prob.shard import Shard
from megatron_rlzero.kernels.product.triton import product

#: blocks of ids that a program takes together
BLOCKS = 16


# Not specialised on anything: the order of the sum over a block follows from how wide the compiler makes its loads.
@triton.jit(
    do_not_specialize=["ids", "real", "blocks", "row_stride", "out_kind"], do_not_specialize_on_alignment=["logits"]
)
def _blocks(
    logits, out, ids, real, blocks, temperature, row_stride, out_kind,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * row_stride + at, mask=at < real, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, temperature + tl.zeros((BLOCKS, BLOCK), dtype=tl.float32))
    peak = tl.max(x, axis=1)
    shifted = x - tl.where(peak == float("-inf"), 0.0, peak)[:, None]  # a block of padding
    weights = tl.exp(shifted)
    moments = tl.where(weights > 0.0, weights * shifted, 0.0)
    to = out + row * blocks + block
    tl.store(to, peak, mask=block < blocks)
    tl.store(to + out_kind, tl.sum(weights, axis=1), mask=block < blocks)
    tl.store(to + 2 * out_kind, tl.sum(moments, axis=1), mask=block < blocks)


@triton.jit(do_not_specialize=["first"])
def _gradient(
    logits, targets, normalisers, grad, out, ids, real, first, temperature, row_stride, SIZE: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + at, mask=at < real, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, temperature + tl.zeros((SIZE,), dtype=tl.float32))
    d = -tl.exp(x - tl.load(normalisers + row)) + tl.where(at + first == tl.load(targets + row), 1.0, 0.0)
    d = d * tl.div_rn(tl.load(grad + row), temperature)
    tl.store(out + row * ids + at, gpu.rounded(d, out.dtype.element_ty), mask=at < ids)


def values(logits: Tensor, targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.values``."""
    peak, total, first_moment = _statistics(logits, shard)
    local = targets - shard.first
    inside = (local >= 0) & (local < logits.shape[1])
    chosen = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0].float() / shard.temperature
    chosen = shard.reduce(torch.where(inside, chosen - peak, 0.0), dist.ReduceOp.SUM)
    log_total = total.log()
    return chosen - log_total, log_total - first_moment / total, peak + log_total


def gradient(logits: Tensor, targets: Tensor, shard: Shard, normalisers: Tensor, grad: Tensor) -> Tensor:
    """See ``reference.gradient``; in the dtype of the logits, which is that of the products that follow."""
    out, grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), grad.contiguous()
    targets = targets.contiguous()
    (rows, ids), size = logits.shape, tiles.VOCABULARY * BLOCKS
    if out.numel():
        sizes = (ids, _real(logits, shard), shard.first, shard.temperature, logits.stride(0))
        _gradient[(rows, triton.cdiv(ids, size))](
            logits, targets, normalisers, grad, out, *sizes, SIZE=size, **_options(logits)
        )
    return out


def weight_gradient(d: Tensor, hidden: Tensor) -> Tensor:
    """See ``reference.weight_gradient``."""
    return product(d.T[None], hidden[None], torch.float32)[0]


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """See ``dispatch.log_softmax``."""
    logits = gpu.rows(logits)
    peak, total, _ = _statistics(logits, Shard(0, logits.shape[1], temperature, None))
    return (logits.float() / temperature - peak[:, None]) - total.log()[:, None]


def _statistics(logits: Tensor, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [rows] each: the peak over all ids, the sum of exp(x - peak), and that of exp(x - peak) (x - peak)."""
    rows, ids = logits.shape
    blocks = triton.cdiv(ids, tiles.VOCABULARY)
    found = torch.empty(3, rows, blocks, dtype=torch.float32, device=logits.device)
    if found.numel():
        sizes = (ids, _real(logits, shard), blocks, shard.temperature, logits.stride(0), found.stride(0))
        constants = {"BLOCK": tiles.VOCABULARY, "BLOCKS": BLOCKS}
        _blocks[(rows, triton.cdiv(blocks, BLOCKS))](logits, found, *sizes, **constants, **_options(logits))
    peaks, sums, moments = found
    peak = shard.reduce(peaks.amax(dim=1), dist.ReduceOp.MAX)
    distance = peaks - peak[:, None]
    factor = distance.exp()
    # a block of padding has the factor zero, and exp(-inf) * -inf is NaN
    moments = torch.where(factor > 0, factor * moments + factor * distance * sums, 0.0)
    return peak, tiles.halving_sum(shard.whole(factor * sums)), tiles.halving_sum(shard.whole(moments))


def _real(logits: Tensor, shard: Shard) -> int:
    """How many of this rank's ids are no padding."""
    return min(max(shard.vocab_size - shard.first, 0), logits.shape[1])


def _options(logits: Tensor) -> dict[str, int | bool]:
    return gpu.options(tiles.gpu(logits.device).vocabulary)
