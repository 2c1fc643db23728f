"""Qwen3: a dense decoder whose attention has q/k norms and no biases (Qwen3 Technical Report, 2025)."""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.dense import Dense

_decoder = Dense(qk_norm=True, qkv_bias=False)
FP32, BUFFERS, rotary = common.FP32, common.BUFFERS, common.rotary
mixer, engine_models = common.no_mixer, common.no_engine_models
transformer_config, layer_pattern, tensors = _decoder.transformer_config, _decoder.layer_pattern, _decoder.tensors
parameters, engine_parameters = _decoder.parameters, _decoder.engine_parameters
trace_points = _decoder.trace_points


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    # Left out, transformers takes those of one checkpoint.
    return common.unsupported(hf, {"attention_bias": False}, stated=("num_key_value_heads", "head_dim"))
