"""The rollout engine's attention: our operator on vLLM's paged cache, in a layout of its own inside the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from megatron_rlzero.invariance.vllm_checks import Counted
from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import paged_attention, plan


class InvariantAttentionImpl(Counted, CPUAttentionBackendImpl):
    """Causal attention; a block of the cache holds its keys, then its values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.alibi_slopes is None and self.sliding_window == -1 and not self.logits_soft_cap
        if not plain or self.sinks is not None or self.is_fp8_kv_cache or self.attn_type != "decoder":
            raise ValueError("kernels = aligned: attention is causal over the whole sequence, without caps or sinks")

    def do_kv_cache_update(self, *_: Any) -> None:
        raise RuntimeError("vLLM was told that forward writes the cache")

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures memory
            return output
        self.used()
        n = attn_metadata.num_actual_tokens
        if not hasattr(attn_metadata, "plan"):  # the same for every layer of a step
            attn_metadata.plan = self._plan(attn_metadata)
        blocks, heads, size, width = kv_cache.shape
        cache = kv_cache.view(blocks, heads, 2, size, width // 2)
        result = paged_attention(query[:n], key[:n], value[:n], cache, attn_metadata.plan, self.scale)
        output[:n] = result.view(output[:n].shape)
        return output

    def _plan(self, attn_metadata: Any) -> Any:
        lengths = attn_metadata.seq_lens.tolist()
        return plan(
            attn_metadata.block_table,
            attn_metadata.slot_mapping,
            attn_metadata.query_start_loc.diff().tolist()[: len(lengths)],
            lengths,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
        )


class InvariantAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our implementation, which writes the cache itself."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [tiles.KEYS]

    @staticmethod
    def get_impl_cls() -> type[InvariantAttentionImpl]:
        return InvariantAttentionImpl
