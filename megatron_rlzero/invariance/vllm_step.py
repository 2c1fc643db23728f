"""What a step of the rollout engine tells its attention and Mamba layers: vLLM's own numbers, where vLLM left them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """The sequences of one forward pass. The tensors are vLLM's own, which a captured CUDA graph reads at each replay.

    Attributes:
        tokens: rows of the layers' inputs; those beyond ``bounds`` are padding.
        bounds: int32 [sequences + 1], where each sequence's new tokens begin, and at last where they end. A sequence
            that pads a graph has none.
        lengths: int32 [sequences], tokens of each, the new ones included.
        block_table: int32 [sequences, blocks].
        slots: int64 [tokens], places in the cache of keys and values; negative for padding.
    """

    tokens: int
    bounds: Tensor
    lengths: Tensor
    block_table: Tensor
    slots: Tensor
    _made: dict[bool, Any] = field(default_factory=dict)

    def shared(self, make: Callable[[Step], T]) -> T:
        """``make(self)``, called by the first of the layers; within a graph that is captured, once more."""
        captured = self.bounds.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured not in self._made:
            self._made[captured] = make(self)
        return self._made[captured]


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Hands the numbers of a step on; no copy to the host, on no device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if vllm_config.num_speculative_tokens:
            raise ValueError("kernels = aligned: speculative decoding is not supported")

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False):
        """See AttentionMetadataBuilder."""
        known = common_attn_metadata
        return Step(
            known.num_actual_tokens,
            known.query_start_loc,
            known.seq_lens,
            known.block_table_tensor,
            known.slot_mapping,
        )
