"""Experts: one linear per expert on its own rows; outputs combined in ascending expert id."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels.linear import linear


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
