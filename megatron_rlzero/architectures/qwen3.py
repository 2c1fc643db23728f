"""Dense Qwen3: every layer is attention with q/k norms, then a SwiGLU MLP (Qwen3 Technical Report, 2025).

Hugging Face layer i is Megatron's layers 2i (attention) and 2i + 1 (MLP).
"""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures import qwen3_common as common
from megatron_rlzero.architectures.rules import Rule, Split, Stacked
from megatron_rlzero.architectures.trace import TracePoint

rope_theta = common.rope_theta


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    return common.unsupported(hf, {})


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return common.transformer_config(hf) | {"ffn_hidden_size": hf["intermediate_size"]}


def layer_pattern(hf: dict[str, Any], stages: int) -> str:
    return "|".join(["*-" * (hf["num_hidden_layers"] // stages)] * stages)


def parameters(hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    hidden, width = hf["hidden_size"], hf["intermediate_size"]
    table = common.ends(hf, slices)
    for i in range(hf["num_hidden_layers"]):
        h, mlp = f"model.layers.{i}", f"decoder.layers.{2 * i + 1}.mlp"
        table |= common.attention(hf, i) | {
            f"{mlp}.linear_fc1.layer_norm_weight": Split(f"{h}.post_attention_layernorm.weight", (hidden,)),
            f"{mlp}.linear_fc1.weight": Stacked(
                (f"{h}.mlp.gate_proj.weight", f"{h}.mlp.up_proj.weight"), (width, hidden)
            ),
            f"{mlp}.linear_fc2.weight": Split(f"{h}.mlp.down_proj.weight", (hidden, width), 1),
        }
    return table


def engine_parameters(hf: dict[str, Any]) -> dict[str, Rule]:
    hidden, width = hf["hidden_size"], hf["intermediate_size"]
    table = common.engine_ends(hf)
    for i in range(hf["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp"
        table |= common.engine_attention(hf, i) | {
            f"{mlp}.gate_up_proj.weight": Stacked(
                (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), (width, hidden)
            ),
            f"{mlp}.down_proj.weight": Split(f"{mlp}.down_proj.weight", (hidden, width), 1),
        }
    return table


def tensors(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return common.tensors(parameters(hf, slices=1))


def trace_points(hf: dict[str, Any]) -> list[TracePoint]:
    """Every operator whose output both sides have, in the order of the forward pass."""
    points = []
    for i in range(hf["num_hidden_layers"]):
        h, mlp = f"model.layers.{i}.mlp", f"decoder.layers.{2 * i + 1}.mlp"
        points += [*common.trace_attention(hf, i), TracePoint(f"layer {i}: norm and MLP", mlp, h)]
    return [*points, common.TRACE_END]
