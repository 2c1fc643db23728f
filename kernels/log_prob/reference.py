"""Vocabulary-parallel log-probabilities and entropies in chunks of rows, recomputed in the backward pass.

The sum over the vocabulary runs over blocks of tiles.VOCABULARY ids counted from id 0 and then by a halving tree over
the blocks, so that it does not depend on the tensor-parallel size. Padded ids are outside it.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.reduction import all_reduce, gather, reduce_scatter, sliced_product


def log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    slices: int = 1,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden W^T / temperature) at ``targets``, and the entropy of that distribution.

    Args:
        hidden: [tokens, H], the same on all ranks of ``group``, or [tokens / ranks, H] with sequence parallelism.
        weight: [padded vocabulary / ranks, H], this rank's rows; a multiple of tiles.VOCABULARY rows on each rank
            where there is more than one.
        targets: int64 [tokens].
        vocab_size: ids from here on are padding.
        slices: of the padded vocabulary, a multiple of the number of ranks; order of the sum in the gradient of
            ``hidden``.
        group: tensor-parallel group, or None for one rank.

    Returns:
        fp32 [tokens] natural log-probabilities, differentiable, and fp32 [tokens] entropies in nats, which are not.
    """
    return _LogProb.apply(hidden, weight, targets, vocab_size, temperature, slices, group, sequence_parallel)


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of a whole vocabulary, fp32 [rows, V], the same bits as ``log_prob`` gives for a token.

    Args:
        logits: [rows, V] without padding, as ``linear`` gives them.
    """
    logits = _over_temperature(logits.float(), temperature)
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - _sum(shifted.exp(), None).log()[:, None]


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, temperature, slices, group, sequence_parallel):
        ctx.layout = (slices, group, sequence_parallel)
        hidden = gather(hidden, group) if sequence_parallel else hidden
        ranks = dist.get_world_size(group) if group is not None else 1
        first = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
        if ranks > 1 and weight.shape[0] % tiles.VOCABULARY:
            raise ValueError(
                f"a vocabulary shard of {weight.shape[0]} rows is no multiple of {tiles.VOCABULARY}: pad the vocabulary"
            )
        ctx.shard = (first, vocab_size, temperature)
        log_probs, entropies, normalisers = (
            torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for rows in _chunks(hidden.shape[0], vocab_size):
            logits = _logits(hidden[rows], weight, *ctx.shard)
            peak = logits.amax(dim=-1)
            _all_reduce(peak, dist.ReduceOp.MAX, group)
            shifted = logits - peak[:, None]
            weights = shifted.exp()
            local = targets[rows] - first
            inside = (local >= 0) & (local < weight.shape[0])
            chosen = shifted.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None])[:, 0]
            chosen = torch.where(inside, chosen, 0.0)  # one rank has it; zeros elsewhere make the sum exact
            _all_reduce(chosen, dist.ReduceOp.SUM, group)
            total = _sum(weights, group)
            # exp(-inf) * -inf is NaN, and a padded id has no part in the entropy.
            first_moment = _sum(torch.where(weights > 0, weights * shifted, 0.0), group)
            log_total = total.log()
            log_probs[rows] = chosen - log_total
            entropies[rows] = log_total - first_moment / total
            normalisers[rows] = peak + log_total
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, normalisers = ctx.saved_tensors
        first, vocab_size, temperature = ctx.shard
        slices, group, sequence_parallel = ctx.layout
        mine = slices // (dist.get_world_size(group) if group is not None else 1)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(hidden.shape[0], vocab_size):
            # d log p(target) / d logits = onehot(target) - p
            d = (_logits(hidden[rows], weight, *ctx.shard) - normalisers[rows, None]).exp().neg_()
            local = targets[rows] - first
            at = ((local >= 0) & (local < weight.shape[0])).nonzero()[:, 0]
            d[at, local[at]] += 1
            d = d * (grad[rows, None] / temperature)
            grad_hidden[rows] = sliced_product(d, weight, mine)
            grad_weight += d.T @ hidden[rows].float()
        grad_hidden = (reduce_scatter if sequence_parallel else all_reduce)(grad_hidden, group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None, None, None, None


def _chunks(tokens: int, vocab_size: int) -> Iterator[slice]:
    """Row slices, multiples of tiles.ROWS, whose fp32 logits over all ranks stay within tiles.LOGITS elements."""
    step = max(tiles.LOGITS // vocab_size // tiles.ROWS, 1) * tiles.ROWS
    return (slice(i, min(i + step, tokens)) for i in range(0, tokens, step))


def _logits(hidden: Tensor, weight: Tensor, first: int, vocab_size: int, temperature: float) -> Tensor:
    """fp32 [rows, shard] logits over the temperature, -inf at padded ids."""
    logits = _over_temperature(linear(hidden, weight).float(), temperature)
    if first + weight.shape[0] > vocab_size:
        logits[:, max(vocab_size - first, 0) :] = float("-inf")
    return logits


def _over_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1.0 else logits / temperature


def _sum(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the whole vocabulary: blocks, then a halving tree over the blocks of all ranks."""
    if missing := -x.shape[1] % tiles.VOCABULARY:
        x = torch.nn.functional.pad(x, (0, missing))
    blocks = x.unflatten(1, (-1, tiles.VOCABULARY)).sum(-1)
    if group is not None and dist.get_world_size(group) > 1:
        parts = [torch.empty_like(blocks) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, blocks, group=group)
        blocks = torch.cat(parts, dim=1)
    return tiles.halving_sum(blocks)


def _all_reduce(x: Tensor, op: dist.ReduceOp, group: ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op, group=group)
