"""RMSNorm: one rounding, statistics in fp32."""

from megatron_rlzero.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
