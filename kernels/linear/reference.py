"""Torch's form of linear, on fixed row tiles: the bits of a row depend neither on others nor on their number."""

from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.tiles import pad_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``dispatch.linear``.

    A library picks other code for one row than for many, with another order of the sum over K; padded to whole
    tiles it never sees few rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = F.linear(pad_rows(rows), weight, bias)[: rows.shape[0]]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See ``dispatch.weight_gradient``."""
    return grad.T @ x
