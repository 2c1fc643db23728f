"""Qwen2 and Qwen2.5: a dense decoder with biases on query, key and value (Qwen2 Technical Report, 2024)."""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.dense import Dense

_decoder = Dense(qk_norm=False, qkv_bias=True)
FP32, BUFFERS, rotary = common.FP32, common.BUFFERS, common.rotary
mixer, engine_models = common.no_mixer, common.no_engine_models
transformer_config, layer_pattern, tensors = _decoder.transformer_config, _decoder.layer_pattern, _decoder.tensors
parameters, engine_parameters = _decoder.parameters, _decoder.engine_parameters
trace_points = _decoder.trace_points


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    wanted = {"qk_norm": False, "dual_chunk_attention_config": None}
    # Left out, transformers takes the KV heads of one checkpoint.
    faults = common.unsupported(hf, wanted, stated=("num_key_value_heads",))
    dim, heads, hidden = hf.get("head_dim"), hf.get("num_attention_heads"), hf.get("hidden_size")
    if dim is not None and heads and dim * heads != hidden:  # the engine's Qwen2 does not read head_dim
        faults.append(f"head_dim = {dim}: only hidden_size / num_attention_heads = {hidden} / {heads} is supported")
    return faults
