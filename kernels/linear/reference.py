"""Torch's form of linear, on fixed row tiles: the bits of a row depend neither on others nor on their number."""

from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels import tiles


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``dispatch.linear``.

    A library picks other code for one row than for many, with another order of the sum over K; padded to whole
    tiles it never sees few rows. Nor does a thread of it see few columns.
    """
    rows, features = x.reshape(-1, x.shape[-1]), len(weight)
    if (missing := tiles.columns() - features) > 0:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    y = F.linear(tiles.pad_rows(rows), weight, bias)[: rows.shape[0], :features]
    return y.reshape(*x.shape[:-1], features)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See ``dispatch.weight_gradient``."""
    return grad.T @ x
