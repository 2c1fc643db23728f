"""Causal attention over packed documents."""

from megatron_rlzero.kernels.attention.reference import attention

__all__ = ["attention"]
