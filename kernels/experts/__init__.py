"""Grouped linear over experts, the order of their rows, and the weighted sum of their outputs."""

from megatron_rlzero.kernels.experts.dispatch import combine, grouped_linear, mlp, permute, unpermute

__all__ = ["combine", "grouped_linear", "mlp", "permute", "unpermute"]
