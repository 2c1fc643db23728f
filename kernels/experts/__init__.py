"""Grouped linear over experts, and the weighted sum of their outputs."""

from megatron_rlzero.kernels.experts.dispatch import combine, grouped_linear, mlp

__all__ = ["combine", "grouped_linear", "mlp"]
