"""Torch's form of the norms: a division and a root, which every library rounds correctly, on whole row tiles."""

from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import silu
from megatron_rlzero.kernels.reduction import tree


def norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z / sqrt(mean(z^2) + eps) * weight with z = x, or x silu(gate).

    Args:
        x, gate: [tokens, groups, H].
        weight: [H], or [groups * H].

    Returns:
        Like ``x``, and fp32 [tokens, groups, 1], the factor on z.
    """
    z = x.float() if gate is None else silu(gate.float()) * x.float()
    scale = row_total(z.square()).div_(x.shape[-1]).add_(eps).sqrt_().reciprocal_()
    return (z * scale).mul_(_by_group(weight, x)).to(x.dtype), scale


def gradients(
    x: Tensor, gate: Tensor | None, weight: Tensor, scale: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of ``norm``.

    Returns:
        Of x, like it; of gate, like it, or None; of weight fp32 [tokens / tiles.ROWS, groups, H], rounded up: of
        every chunk of tokens, which are added by ``tree``.
    """
    grad, wide = grad.float(), x.float()
    z = wide if gate is None else silu(gate.float()) * wide
    normed = z * scale
    weighted = grad * _by_group(weight, x)
    inner = row_total(weighted * normed) / x.shape[-1]
    grad_z = scale * (weighted - normed * inner)
    chunks = tree(tiles.pad_rows(grad * normed).unflatten(0, (-1, tiles.ROWS)), dim=1)
    if gate is None:
        return grad_z.to(x.dtype), None, chunks
    # exp overflows for a gate below -88: the sigmoid is then 0 and so are both gradients.
    wide_gate = gate.float()
    sigmoid = 1 / (1 + (-wide_gate).exp())
    grad_x = (grad_z * wide_gate * sigmoid).to(x.dtype)
    grad_gate = (grad_z * wide * sigmoid * (1 + wide_gate * (1 - sigmoid))).to(gate.dtype)
    return grad_x, grad_gate, chunks


def row_total(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, on whole row tiles."""
    rows = x.reshape(-1, x.shape[-1])
    return tiles.pad_rows(rows).sum(-1)[: rows.shape[0]].view(*x.shape[:-1], 1)


def _by_group(weight: Tensor, x: Tensor) -> Tensor:
    return weight.float().view(-1, x.shape[-1])
