"""Causal depthwise convolution of Mamba layers."""

from megatron_rlzero.kernels.conv1d.dispatch import causal_conv1d, causal_conv1d_cached

__all__ = ["causal_conv1d", "causal_conv1d_cached"]
