"""Experts: one linear per expert on its own rows; outputs combined in ascending expert id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.linear import linear

#: Rows of all experts together, padding included, up to which one product over all of them is taken.
FEW = 1024
#: Rows of an expert in that product are padded to a multiple of this: the library's code for many rows starts here.
LEAST = 8


def grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Rows of expert e times the weight of expert e.

    Args:
        x: [sum(rows), K], sorted by expert.
        weights: [N, K] each, one per local expert.
        rows: how many rows each expert has.

    Returns:
        [sum(rows), N]. An expert without rows takes part with a product of no rows, so that it gets a zero gradient.
    """
    return torch.cat([linear(part, w) for part, w in zip(x.split(list(rows)), weights, strict=True)])


def mlp(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, gated: bool = True) -> Tensor:
    """Experts without gradients: each row through one expert, the bits of ``grouped_linear``.

    Args:
        x: [n, H], sorted by expert.
        experts: int64 [n], the expert of each row.
        w13: [E, 2 I, H], gate above up, or [E, I, H] if not gated; w2: [E, H, I].
        gated: SwiGLU, or else a squared ReLU between the two.

    Returns:
        [n, H].

    Few rows go through one product over all experts, each padded to the same number of rows.
    """
    activation = silu_and_mul if gated else squared_relu
    rows = torch.bincount(experts, minlength=len(w13))
    most = tiles.round_up(max(int(rows.max()), 1), LEAST)
    if len(w13) * most > FEW:
        counts = rows.tolist()
        return grouped_linear(activation(grouped_linear(x, w13.unbind(), counts)), w2.unbind(), counts)
    starts = rows.cumsum(0) - rows
    place = experts * most + torch.arange(len(x), device=x.device) - starts[experts]
    padded = x.new_zeros(len(w13) * most, x.shape[1]).index_copy_(0, place, x).view(len(w13), most, -1)
    hidden = activation(torch.bmm(padded, w13.transpose(1, 2)))
    return torch.bmm(hidden, w2.transpose(1, 2)).flatten(0, 1).index_select(0, place)


def combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    """sum_k p_k y_k, added in ascending expert id, in fp32, rounded once.

    Args:
        outputs: [tokens, k, H], slots in ascending expert id.
        probabilities: fp32 [tokens, k].

    Returns:
        [tokens, H], dtype of ``outputs``.
    """
    weighted = outputs.float() * probabilities[..., None]
    total = weighted[:, 0]
    for slot in range(1, weighted.shape[1]):
        total = total + weighted[:, slot]
    return total.to(outputs.dtype)
