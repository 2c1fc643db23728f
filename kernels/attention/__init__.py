"""Causal attention over packed documents and over a paged cache, one arithmetic."""

from megatron_rlzero.kernels.attention.paged import paged_attention, write_cache
from megatron_rlzero.kernels.attention.reference import attention

__all__ = ["attention", "paged_attention", "write_cache"]
