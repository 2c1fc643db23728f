"""Sums over slices on one rank, in the form of the device: one binary tree of neighbours for all of them."""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.reduction import reference


def tree(x: Tensor, dim: int = 0) -> Tensor:
    """Sum over ``dim`` by a binary tree of neighbours: (x0 + x1) + (x2 + x3) and so on, in the dtype of ``x``.

    The length is padded to a power of two with zeros. The bits are the same in every form.
    """
    return _form(x).tree(x.movedim(dim, 0))


def row_sum(x: Tensor) -> Tensor:
    """fp32 sum over the rows of ``x`` [n, m] by ``tree``, whatever m is."""
    return _form(x).row_sum(x)


def sliced_product(x: Tensor, weight: Tensor, slices: int, blocks: Sequence[int] = ()) -> Tensor:
    """x W over ``slices`` slices of the contracted dimension, added by ``tree``.

    Args:
        x: [rows, n].
        weight: [n, m].
        slices: how many slices this rank holds.
        blocks: sizes of blocks one after the other that make up ``n``, each of which is cut: a slice is the same part
            of every block. Without any, n is one block.

    Returns:
        fp32 [rows, m], not rounded to the dtype of ``x``.

    Raises:
        ValueError: a block does not divide into slices.
    """
    n = x.shape[1]
    blocks = list(blocks) or [n]
    if wrong := [size for size in blocks if size % slices]:
        raise ValueError(f"a contraction over {n} does not divide into {slices} slices: it has a block of {wrong[0]}")
    parts = [part.unflatten(1, (slices, -1)) for part in x.split(blocks, 1)]
    weights = [part.unflatten(0, (slices, -1)) for part in weight.split(blocks)]
    return tree(_form(x).slice_products(parts, weights))


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.reduction import triton

    return triton
