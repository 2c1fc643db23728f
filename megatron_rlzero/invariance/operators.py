"""Which functions the learner's modules compute with: ours, or torch's as they come, for comparison.

``kernels: aligned`` takes them from ``kernels``. ``kernels: stock`` is what a learner has without this project: scaled
dot product attention per document, plain linear, torch's norm and activation, and Megatron's sums over ranks. Only the
log-probability at the end stays ours, since the alternative would hold the logits of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels import activation, attention, experts, linear, log_prob, norm, router


@dataclass(frozen=True)
class Operators:
    """One function per operator, with the signatures of ``kernels``.

    Attributes:
        whole_gradients: whether each rank computes the whole gradient of a weight that all tensor-parallel ranks hold;
            otherwise its part, which Megatron adds up.
    """

    column_parallel: Callable[..., Tensor]
    row_parallel: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    top_k: Callable[..., tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    grouped_linear: Callable[..., Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]
    log_prob: Callable[..., tuple[Tensor, Tensor]]
    whole_gradients: bool


ALIGNED = Operators(
    linear.column_parallel,
    linear.row_parallel,
    norm.rms_norm,
    attention.attention,
    router.gate,
    router.top_k,
    activation.silu_and_mul,
    experts.grouped_linear,
    experts.combine,
    log_prob.log_prob,
    whole_gradients=True,
)


def _column_parallel(
    x: Tensor, weight: Tensor, slices: int, group, sequence_parallel: bool, stacked: int = 1, bias: Tensor | None = None
) -> Tensor:
    enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    return F.linear(enter(x, group=group), weight, bias)


def _row_parallel(x: Tensor, weight: Tensor, slices: int, group, sequence_parallel: bool) -> Tensor:
    leave = (
        reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
    )
    return leave(F.linear(x, weight), group=group)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, rows=None, heads=None) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    documents = (
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in document), is_causal=True, scale=scale, enable_gqa=True
        )
        for document in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    )
    return torch.cat([out.transpose(0, 1) for out in documents])


def _gate(x: Tensor, weight: Tensor, rows=None) -> Tensor:
    return F.linear(x.float(), weight.float())


def _top_k(logits: Tensor, k: int, renormalise: bool, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    chosen = torch.topk(logits.softmax(-1), k).indices
    chosen = chosen.sort(dim=-1).values  # the modules expect ascending ids
    probabilities = logits.softmax(-1).gather(1, chosen)
    if renormalise:
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities * scaling, chosen


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(list(rows)), weights, strict=True)])


def _combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    return (outputs * probabilities[..., None]).sum(1).to(outputs.dtype)


STOCK = Operators(
    _column_parallel,
    _row_parallel,
    _rms_norm,
    _attention,
    _gate,
    _top_k,
    _silu_and_mul,
    _grouped_linear,
    _combine,
    log_prob.log_prob,
    whole_gradients=False,
)

#: the values of the configuration's ``kernels``
OPERATORS = {"aligned": ALIGNED, "stock": STOCK}
