"""Causal depthwise convolution of Mamba layers."""

from megatron_rlzero.kernels.conv1d.reference import causal_conv1d, conv_state

__all__ = ["causal_conv1d", "conv_state"]
