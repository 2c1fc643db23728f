"""The rollout engine's attention: our operator on vLLM's paged cache, in a layout of its own inside the blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.kv_cache_interface import KVCacheLayout

from megatron_rlzero.invariance.vllm_checks import Counted
from megatron_rlzero.invariance.vllm_step import Step, StepBuilder
from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import paged_attention, plan_at


class InvariantAttentionImpl(AttentionImpl[Step], Counted):
    """Causal attention; a block of the cache holds its keys, then its values."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.wait()
        features = (alibi_slopes, sliding_window, kv_sharing_target_layer_name, sinks, logits_soft_cap or None)
        if any(x is not None for x in features) or kv_cache_dtype != "auto" or attn_type != "decoder":
            raise ValueError(
                "kernels = aligned: attention is causal over the whole sequence, without caps, slopes, sinks or a "
                "quantised cache"
            )
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes ``output`` and the cache; see AttentionImpl."""
        if attn_metadata is None:  # vLLM measures memory
            return output.zero_()
        self.used()
        n = attn_metadata.tokens
        blocks, heads, size, width = kv_cache.shape
        cache = kv_cache.view(blocks, heads, 2, size, width // 2)
        plan = attn_metadata.shared(self._plan)
        result = paged_attention(query[:n], key[:n], value[:n], cache, plan, self.scale)
        output[:n] = result.view(output[:n].shape)
        return output

    def _plan(self, step: Step) -> Any:
        sizes = (step.tokens, self.num_heads, self.num_kv_heads, self.head_size)
        return plan_at(step.block_table, step.slots, step.bounds, step.lengths, *sizes)


class InvariantAttentionBackend(AttentionBackend):
    """Its implementation writes the cache itself."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """That of the entry in vLLM's registry which it replaces; see ``vllm_layers.install``."""
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """One block of keys."""
        return [tiles.KEYS]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A head's keys and values lie side by side within a block."""
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[InvariantAttentionImpl]:
        """See AttentionBackend."""
        return InvariantAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """See AttentionBackend."""
        return StepBuilder
