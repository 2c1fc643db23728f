"""Which functions the learner's modules compute with: ours, or torch's as they come, for comparison.

``kernels: aligned`` takes them from ``kernels``. ``kernels: stock`` is what a learner has without this project: scaled
dot product attention per document, plain linear, torch's norm, convolution and activation, and Megatron's sums over
ranks. The log-probability at the end stays ours, since the alternative would hold the logits of every token, and so
does the Mamba scan, which Megatron has from mamba_ssm alone.
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

from megatron_rlzero.kernels import activation, attention, conv1d, experts, linear, log_prob, mamba, norm, router


@dataclass(frozen=True)
class Operators:
    """One function per operator, with the signatures of ``kernels``.

    Attributes:
        whole_gradients: whether each rank computes the whole gradient of a weight that all tensor-parallel ranks hold;
            otherwise its part, which Megatron adds up.
    """

    column_parallel: Callable[..., Tensor]
    row_parallel: Callable[..., Tensor]
    replicated: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    top_k: Callable[..., tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    squared_relu: Callable[[Tensor], Tensor]
    grouped_linear: Callable[..., Tensor]
    permute: Callable[[Tensor, Tensor], Tensor]
    unpermute: Callable[[Tensor, Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], Tensor]
    causal_conv1d: Callable[..., Tensor]
    scan: Callable[..., Tensor]
    gated_group_norm: Callable[..., Tensor]
    log_prob: Callable[..., tuple[Tensor, Tensor]]
    whole_gradients: bool


ALIGNED = Operators(
    linear.column_parallel,
    linear.row_parallel,
    linear.replicated,
    norm.rms_norm,
    attention.attention,
    router.gate,
    router.top_k,
    activation.silu_and_mul,
    activation.squared_relu,
    experts.grouped_linear,
    experts.permute,
    experts.unpermute,
    experts.combine,
    conv1d.causal_conv1d,
    mamba.scan,
    norm.gated_group_norm,
    log_prob.log_prob,
    whole_gradients=True,
)


def _column_parallel(
    x: Tensor,
    weight: Tensor,
    slices: int,
    group,
    sequence_parallel: bool,
    blocks: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Tensor:
    enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
    return F.linear(enter(x, group=group), weight, bias)


def _row_parallel(x: Tensor, weight: Tensor, slices: int, group, sequence_parallel: bool) -> Tensor:
    leave = (
        reduce_scatter_to_sequence_parallel_region if sequence_parallel else reduce_from_tensor_model_parallel_region
    )
    return leave(F.linear(x, weight), group=group)


def _replicated(x: Tensor, weight: Tensor, rows=None) -> Tensor:
    return F.linear(x, weight)


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


def _top_k(
    logits: Tensor,
    k: int,
    renormalise: bool,
    scaling: float = 1.0,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_top_k: int = 1,
) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = torch.topk(grouped.topk(2).values.sum(-1), group_top_k).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = torch.topk(choice, k).indices.sort(dim=-1).values  # the modules expect ascending ids
    probabilities = scores.gather(1, chosen)
    if renormalise:
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return probabilities * scaling, chosen


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(list(rows)), weights, strict=True)])


def _permute(x: Tensor, slots: Tensor) -> Tensor:
    return x[slots.flatten().argsort() // slots.shape[1]]


def _unpermute(rows: Tensor, slots: Tensor) -> Tensor:
    return rows[slots]


def _combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    return (outputs * probabilities[..., None]).sum(1).to(outputs.dtype)


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, lengths: list[int]) -> Tensor:
    channels, width = weight.shape
    documents = (
        F.silu(F.conv1d(F.pad(part.T, (width - 1, 0)), weight[:, None], bias, groups=channels)).T
        for part in x.split(lengths)
    )
    return torch.cat(list(documents))


def _gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    gated = (x.float() * F.silu(gate.float())).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return weight * normed.flatten(-2).to(x.dtype)


STOCK = Operators(
    _column_parallel,
    _row_parallel,
    _replicated,
    _rms_norm,
    _attention,
    _gate,
    _top_k,
    _silu_and_mul,
    _squared_relu,
    _grouped_linear,
    _permute,
    _unpermute,
    _combine,
    _causal_conv1d,
    mamba.scan,
    _gated_group_norm,
    log_prob.log_prob,
    whole_gradients=False,
)

#: the values of the configuration's ``kernels``
OPERATORS = {"aligned": ALIGNED, "stock": STOCK}
