"""Causal attention over packed documents and over a paged cache, one arithmetic."""

from megatron_rlzero.kernels.attention.paged import Plan, paged_attention, plan
from megatron_rlzero.kernels.attention.reference import attention

__all__ = ["Plan", "attention", "paged_attention", "plan"]
