"""Gated activation from shape-invariant primitives."""

from megatron_rlzero.kernels.activation.reference import silu_and_mul

__all__ = ["silu_and_mul"]
