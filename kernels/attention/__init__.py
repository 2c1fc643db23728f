"""Causal attention over packed documents and over a paged cache, one arithmetic."""

from megatron_rlzero.kernels.attention.dispatch import attention, paged_attention, plan, plan_at

__all__ = ["attention", "paged_attention", "plan", "plan_at"]
