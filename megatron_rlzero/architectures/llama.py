"""Llama: a dense decoder without biases and q/k norms (Touvron et al., 2023; rotary scaling: Llama 3.1, 2024)."""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.dense import Dense

_decoder = Dense(qk_norm=False, qkv_bias=False)
FP32, BUFFERS, rotary = common.FP32, common.BUFFERS, common.rotary
mixer, engine_models = common.no_mixer, common.no_engine_models
transformer_config, layer_pattern, tensors = _decoder.transformer_config, _decoder.layer_pattern, _decoder.tensors
parameters, engine_parameters = _decoder.parameters, _decoder.engine_parameters
trace_points = _decoder.trace_points


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    return common.unsupported(hf, dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias"), False))
