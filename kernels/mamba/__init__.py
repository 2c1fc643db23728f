"""The selective scan of Mamba-2 in chunks, for packed documents and for sequences with a cache."""

from megatron_rlzero.kernels.mamba.cached import Cache, scan_cached
from megatron_rlzero.kernels.mamba.reference import scan

__all__ = ["Cache", "scan", "scan_cached"]
