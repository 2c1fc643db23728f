"""Linear on fixed row tiles, alone and split over tensor-parallel ranks."""

from megatron_rlzero.kernels.linear.parallel import column_parallel, replicated, row_parallel
from megatron_rlzero.kernels.linear.reference import linear

__all__ = ["column_parallel", "linear", "replicated", "row_parallel"]
