"""Sums over slices and over ranks, in one stated order."""

from megatron_rlzero.kernels.reduction.reference import (
    all_reduce,
    gather,
    reduce_scatter,
    row_sum,
    sliced_product,
    tree,
)

__all__ = ["all_reduce", "gather", "reduce_scatter", "row_sum", "sliced_product", "tree"]
