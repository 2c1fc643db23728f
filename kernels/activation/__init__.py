"""Activations from shape-invariant primitives."""

from megatron_rlzero.kernels.activation.reference import silu, silu_and_mul, softplus, squared_relu

__all__ = ["silu", "silu_and_mul", "softplus", "squared_relu"]
