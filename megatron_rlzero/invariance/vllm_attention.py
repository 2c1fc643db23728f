"""The rollout engine's attention: our operator on vLLM's paged cache, in a layout of its own inside the blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from megatron_rlzero.invariance.vllm_checks import Counted
from megatron_rlzero.kernels.attention import paged_attention, write_cache


class InvariantAttentionImpl(Counted, CPUAttentionBackendImpl):
    """Causal attention; a block of the cache holds its keys, then its values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = self.alibi_slopes is None and self.sliding_window == -1 and not self.logits_soft_cap
        if not plain or self.sinks is not None or self.is_fp8_kv_cache or self.attn_type != "decoder":
            raise ValueError("kernels = aligned: attention is causal over the whole sequence, without caps or sinks")

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        write_cache(key, value, *_halves(kv_cache), slot_mapping.long())

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
            lengths = attn_metadata.seq_lens.tolist()
            attn_metadata.plan = (attn_metadata.query_start_loc.diff().tolist()[: len(lengths)], lengths)
        result = paged_attention(
            query[:n], *_halves(kv_cache), attn_metadata.block_table, *attn_metadata.plan, self.scale
        )
        output[:n] = result.view(output[:n].shape)
        return output


class InvariantAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our implementation."""

    @staticmethod
    def get_impl_cls() -> type[InvariantAttentionImpl]:
        return InvariantAttentionImpl


def _halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, kv_heads, block size, 2 dim] -> keys and values, [blocks, kv_heads, block size, dim] each."""
    blocks, heads, size, width = kv_cache.shape
    return kv_cache.view(blocks, heads, 2, size, width // 2).unbind(2)
