"""RMSNorm and the gated group norm of Mamba layers: one rounding, statistics in fp32."""

from megatron_rlzero.kernels.norm.dispatch import gated_group_norm, rms_norm

__all__ = ["gated_group_norm", "rms_norm"]
