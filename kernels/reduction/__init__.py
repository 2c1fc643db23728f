"""Sums over slices and over ranks, in one stated order."""

from megatron_rlzero.kernels.reduction.dispatch import row_sum, sliced_product, tree
from megatron_rlzero.kernels.reduction.ranks import all_reduce, gather, reduce_scatter

__all__ = ["all_reduce", "gather", "reduce_scatter", "row_sum", "sliced_product", "tree"]
