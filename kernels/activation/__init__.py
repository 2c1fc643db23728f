"""Activations from shape-invariant primitives."""

from megatron_rlzero.kernels.activation.dispatch import silu_and_mul, squared_relu
from megatron_rlzero.kernels.activation.reference import silu, softplus

__all__ = ["silu", "silu_and_mul", "softplus", "squared_relu"]
