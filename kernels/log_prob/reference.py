"""Torch's form of the vocabulary's log-softmax: the peak, then sums of exponentials over blocks and a halving tree."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.log_prob.shard import Shard


def values(logits: Tensor, targets: Tensor, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, entropies, and log of the sum of all exponentials: fp32 [rows] each.

    Args:
        logits: [rows, this rank's ids], as ``linear`` gives them.
    """
    logits = _masked(logits, shard)
    peak = shard.reduce(logits.amax(dim=-1), dist.ReduceOp.MAX)
    shifted = logits - peak[:, None]
    weights = shifted.exp()
    local = targets - shard.first
    inside = (local >= 0) & (local < logits.shape[1])
    chosen = shifted.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    chosen = shard.reduce(torch.where(inside, chosen, 0.0), dist.ReduceOp.SUM)
    total = _sum(weights, shard)
    # exp(-inf) * -inf is NaN, and a padded id has no part in the entropy.
    first_moment = _sum(torch.where(weights > 0, weights * shifted, 0.0), shard)
    log_total = total.log()
    return chosen - log_total, log_total - first_moment / total, peak + log_total


def gradient(logits: Tensor, targets: Tensor, shard: Shard, normalisers: Tensor, grad: Tensor) -> Tensor:
    """Gradients of the logits as ``linear`` gives them, fp32 [rows, ids]: (onehot(target) - p) grad / temperature."""
    d = (_masked(logits, shard) - normalisers[:, None]).exp().neg_()
    local = targets - shard.first
    at = ((local >= 0) & (local < logits.shape[1])).nonzero()[:, 0]
    d[at, local[at]] += 1
    return d * (grad[:, None] / shard.temperature)


def weight_gradient(d: Tensor, hidden: Tensor) -> Tensor:
    """fp32 [ids, H] of what ``gradient`` gives and hidden [rows, H]."""
    return d.T @ hidden.float()


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """See ``dispatch.log_softmax``."""
    shard = Shard(0, logits.shape[1], temperature, None)
    logits = _masked(logits, shard)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - _sum(shifted.exp(), shard).log()[:, None]


def _masked(logits: Tensor, shard: Shard) -> Tensor:
    """fp32 logits over the temperature, -inf at padded ids."""
    logits = logits.float() if shard.temperature == 1.0 else logits.float() / shard.temperature
    if shard.first + logits.shape[1] > shard.vocab_size:
        padded = torch.arange(shard.first, shard.first + logits.shape[1], device=logits.device) >= shard.vocab_size
        logits = logits.masked_fill(padded, float("-inf"))
    return logits


def _sum(x: Tensor, shard: Shard) -> Tensor:
    """Sum over the whole vocabulary: blocks, then a halving tree over the blocks of all ranks."""
    if missing := -x.shape[1] % tiles.VOCABULARY:
        x = torch.nn.functional.pad(x, (0, missing))
    return tiles.halving_sum(shard.whole(x.unflatten(1, (-1, tiles.VOCABULARY)).sum(-1)))
