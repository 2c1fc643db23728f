"""Linear: y = x W^T + b on fixed row tiles."""

from megatron_rlzero.kernels.linear.reference import linear

__all__ = ["linear"]
