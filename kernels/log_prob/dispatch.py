"""Vocabulary-parallel log-probabilities and entropies in chunks of rows, recomputed in the backward pass.

The sum over the vocabulary runs over blocks of tiles.VOCABULARY ids counted from id 0 and then by a halving tree over
the blocks, so that it does not depend on the tensor-parallel size. Padded ids are outside it.
"""

from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels import backend, tiles
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.log_prob import reference
from megatron_rlzero.kernels.log_prob.shard import Shard
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
    return _form(logits).log_softmax(logits, temperature)


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.log_prob import triton

    return triton


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, temperature, slices, group, sequence_parallel):
        hidden = gather(hidden, group) if sequence_parallel else hidden
        ranks = dist.get_world_size(group) if group is not None else 1
        first = weight.shape[0] * (dist.get_rank(group) if group is not None else 0)
        if ranks > 1 and weight.shape[0] % tiles.VOCABULARY:
            raise ValueError(
                f"a vocabulary shard of {weight.shape[0]} rows is no multiple of {tiles.VOCABULARY}: pad the vocabulary"
            )
        shard, form = Shard(first, vocab_size, temperature, group if ranks > 1 else None), _form(hidden)
        found = torch.empty(3, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, vocab_size):
            values = form.values(linear(hidden[rows], weight), targets[rows], shard)
            for row, part in zip(found, values, strict=True):
                row[rows] = part
        log_probs, entropies, normalisers = found
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.layout = (shard, slices // ranks, group, sequence_parallel)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, weight, targets, normalisers = ctx.saved_tensors
        shard, slices, group, sequence_parallel = ctx.layout
        form = _form(hidden)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(hidden, shard.vocab_size):
            logits = linear(hidden[rows], weight)
            d = form.gradient(logits, targets[rows], shard, normalisers[rows], grad[rows])
            grad_hidden[rows] = sliced_product(d, weight, slices)
            grad_weight += form.weight_gradient(d, hidden[rows])
        grad_hidden = (reduce_scatter if sequence_parallel else all_reduce)(grad_hidden, group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *(None,) * 6


def _chunks(hidden: Tensor, vocab_size: int) -> Iterator[slice]:
    """Row slices, multiples of tiles.ROWS, whose fp32 logits over all ranks stay within a number of elements."""
    most = tiles.LOGITS if hidden.device.type == "cpu" else tiles.GPU_LOGITS
    tokens, step = len(hidden), max(most // vocab_size // tiles.ROWS, 1) * tiles.ROWS
    return (slice(i, min(i + step, tokens)) for i in range(0, tokens, step))
