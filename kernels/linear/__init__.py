"""Linear on fixed row tiles, alone and split over tensor-parallel ranks."""

from megatron_rlzero.kernels.linear.dispatch import linear, weight_gradient
from megatron_rlzero.kernels.linear.parallel import column_parallel, replicated, row_parallel

__all__ = ["column_parallel", "linear", "replicated", "row_parallel", "weight_gradient"]
