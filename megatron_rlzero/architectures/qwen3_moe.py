"""Qwen3-MoE: every layer is attention with q/k norms, then a mixture of SwiGLU experts (Qwen3 Technical Report, 2025).

Hugging Face layer i is Megatron's layers 2i (attention) and 2i + 1 (experts).
"""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.rules import Rule, Split, Stacked
from megatron_rlzero.architectures.trace import TracePoint, chosen

FP32, BUFFERS, rotary = common.FP32, common.BUFFERS, common.rotary
mixer, engine_models = common.no_mixer, common.no_engine_models
_ATTENTION = {"qk_norm": True, "qkv_bias": False}


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    wanted = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    # Left out, transformers takes the KV heads of one checkpoint.
    return common.unsupported(hf, wanted, stated=("num_key_value_heads",))


def experts(hf: dict[str, Any]) -> int:
    """transformers 5 writes num_local_experts, published checkpoints have num_experts."""
    return hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return common.transformer_config(hf, **_ATTENTION) | {
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "num_moe_experts": experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        # Megatron renormalises by taking the softmax after the choice; with pre_softmax it does not renormalise.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


def layer_pattern(hf: dict[str, Any], stages: int) -> str:
    return common.layer_pattern(["*E"] * hf["num_hidden_layers"], stages)


def parameters(hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    hidden, width = hf["hidden_size"], hf["moe_intermediate_size"]
    table = common.ends(hf, slices)
    for i in range(hf["num_hidden_layers"]):
        h, moe = f"model.layers.{i}", f"decoder.layers.{2 * i + 1}"
        table |= common.attention(hf, 2 * i, f"{h}.self_attn", f"{h}.input_layernorm.weight", **_ATTENTION) | {
            f"{moe}.pre_mlp_layernorm.weight": Split(f"{h}.post_attention_layernorm.weight", (hidden,)),
            f"{moe}.mlp.router.weight": Split(f"{h}.mlp.gate.weight", (experts(hf), hidden)),
        }
        for e in range(experts(hf)):
            x = f"{h}.mlp.experts.{e}"
            table |= {
                f"{moe}.mlp.experts.linear_fc1.weight{e}": Stacked(
                    (f"{x}.gate_proj.weight", f"{x}.up_proj.weight"), (width, hidden)
                ),
                f"{moe}.mlp.experts.linear_fc2.weight{e}": Split(f"{x}.down_proj.weight", (hidden, width), 1),
            }
    return table


def engine_parameters(hf: dict[str, Any]) -> dict[str, Rule]:
    hidden, width = hf["hidden_size"], hf["moe_intermediate_size"]
    table = common.engine_ends(hf)
    for i in range(hf["num_hidden_layers"]):
        h = f"model.layers.{i}"
        a, mlp = f"{h}.self_attn", f"{h}.mlp"
        table |= common.engine_norms(hf, h) | common.engine_attention(hf, a, a, **_ATTENTION)
        table[f"{mlp}.gate.weight"] = Split(f"{mlp}.gate.weight", (experts(hf), hidden))
        for e in range(experts(hf)):
            x, stacked = f"{mlp}.experts.{e}", f"{mlp}.experts.routed_experts"
            table |= {
                f"{stacked}.w13_weight.{e}": Stacked((f"{x}.gate_proj.weight", f"{x}.up_proj.weight"), (width, hidden)),
                f"{stacked}.w2_weight.{e}": Split(f"{x}.down_proj.weight", (hidden, width), 1),
            }
    return table


def tensors(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return common.tensors(parameters(hf, slices=1))


def trace_points(hf: dict[str, Any]) -> list[TracePoint]:
    """Every operator whose output both sides have, in the order of the forward pass."""
    points = []
    for i in range(hf["num_hidden_layers"]):
        h, moe, choose = f"model.layers.{i}", f"decoder.layers.{2 * i + 1}", chosen(hf["num_experts_per_tok"])
        router = TracePoint(
            f"layer {i}: router choice", f"{moe}.mlp.router", f"{h}.mlp.gate", lambda output: output[1], choose
        )
        points += [
            *common.trace_attention(hf, i, 2 * i, f"{h}.self_attn", qk_norm=True),
            TracePoint(
                f"layer {i}: residual and norm after attention",
                f"{moe}.pre_mlp_layernorm",
                f"{h}.post_attention_layernorm",
            ),
            router,
            TracePoint(f"layer {i}: experts", f"{moe}.mlp", f"{h}.mlp"),
        ]
    return [*points, common.TRACE_END]
