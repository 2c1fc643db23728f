"""The selective scan of Mamba-2 in chunks, for packed documents and for sequences with a cache."""

from megatron_rlzero.kernels.mamba.cached import Cache
from megatron_rlzero.kernels.mamba.dispatch import scan, scan_cached, scan_cached_at

__all__ = ["Cache", "scan", "scan_cached", "scan_cached_at"]
