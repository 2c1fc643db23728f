"""Linear on fixed row tiles: the bits of a row depend neither on the other rows nor on how many there are."""

from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.tiles import pad_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.

    Args:
        x: [..., K].
        weight: [N, K], dtype of ``x``.
        bias: [N] or None.

    Returns:
        [..., N], dtype of ``x``; products are accumulated in fp32 and rounded once.

    A library picks other code for one row than for many, with another order of the sum over K; padded to whole
    tiles it never sees few rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = F.linear(pad_rows(rows), weight, bias)[: rows.shape[0]]
    return y.reshape(*x.shape[:-1], weight.shape[0])
