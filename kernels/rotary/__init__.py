"""Rotary position embedding from float64 tables."""

from megatron_rlzero.kernels.rotary.dispatch import apply_rotary
from megatron_rlzero.kernels.rotary.reference import rotary_table

__all__ = ["apply_rotary", "rotary_table"]
