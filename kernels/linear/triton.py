"""Linear by one product on fixed tiles, and its gradients by two others."""

from torch import Tensor

from megatron_rlzero.kernels.product.triton import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See ``dispatch.linear``."""
    y = product(x.reshape(1, -1, x.shape[-1]), weight.T[None], x.dtype, bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """See ``dispatch.weight_gradient``."""
    return product(grad.T[None], x[None], x.dtype)[0]
