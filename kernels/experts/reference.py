"""Torch's form of experts: one linear per expert on its own rows; outputs combined in ascending expert id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.product.reference import batched

#: Rows of all experts together, padding included, up to which one product over all of them is taken.
FEW = 1024
#: Rows of an expert in that product are padded to a multiple of this: the library's code for many rows starts here.
LEAST = 8


def grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """See ``dispatch.grouped_linear``; an expert without rows takes part with a product of no rows."""
    return torch.cat([linear(part, w) for part, w in zip(x.split(list(rows)), weights, strict=True)])


def mlp(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, gated: bool) -> Tensor:
    """See ``dispatch.mlp``."""
    mine, order = torch.sort(experts.flatten(), stable=True)  # pairs of token and slot, by expert, then token
    elsewhere = int((mine < 0).sum())
    mine, order = mine[elsewhere:], order[elsewhere:]
    outputs = x.new_zeros(experts.numel(), x.shape[1])
    outputs.index_copy_(0, order, _sorted(x.index_select(0, order // experts.shape[1]), mine, w13, w2, gated))
    return outputs.view(*experts.shape, x.shape[1])


def _sorted(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, gated: bool) -> Tensor:
    """Rows sorted by expert; few of them go through one product over all experts, padded to the same number of rows."""
    activation = silu_and_mul if gated else squared_relu
    rows = torch.bincount(experts, minlength=len(w13))
    most = tiles.round_up(max(int(rows.max()), 1), LEAST)
    if len(w13) * most > FEW:
        counts = rows.tolist()
        return grouped_linear(activation(grouped_linear(x, w13.unbind(), counts)), w2.unbind(), counts)
    starts = rows.cumsum(0) - rows
    place = experts * most + torch.arange(len(x), device=x.device) - starts[experts]
    padded = x.new_zeros(len(w13) * most, x.shape[1]).index_copy_(0, place, x).view(len(w13), most, -1)
    hidden = activation(batched(padded, w13.transpose(1, 2)))
    return batched(hidden, w2.transpose(1, 2)).flatten(0, 1).index_select(0, place)


def combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    """See ``dispatch.combine``."""
    weighted = outputs.float() * probabilities[..., None]
    total = weighted[:, 0]
    for slot in range(1, weighted.shape[1]):
        total = total + weighted[:, slot]
    return total.to(outputs.dtype)
