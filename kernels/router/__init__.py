"""The router: fp32 gate, top-k choice with the lowest expert id on ties."""

from megatron_rlzero.kernels.router.dispatch import top_k
from megatron_rlzero.kernels.router.gate import gate

__all__ = ["gate", "top_k"]
