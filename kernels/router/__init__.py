"""Top-k routing in fp32."""

from megatron_rlzero.kernels.router.reference import gate, top_k

__all__ = ["gate", "top_k"]
