"""Qwen3-MoE: every layer is attention with q/k norms, then a mixture of SwiGLU experts (Qwen3 Technical Report, 2025).

Hugging Face layer i is Megatron's layers 2i (attention) and 2i + 1 (experts).
"""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures.rules import GroupedQKV, Rule, Split, Stacked, Vocabulary


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    wanted = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
    }
    faults = [f"{k} = {hf[k]!r}: only {v!r} is supported" for k, v in wanted.items() if hf.get(k, v) not in (v, None)]
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        faults.append(f"rope_type = {rope['rope_type']!r}: only 'default' is supported")
    return faults


def rope_theta(hf: dict[str, Any]) -> float:
    return float((hf.get("rope_parameters") or {}).get("rope_theta") or hf.get("rope_theta") or 1e6)


def experts(hf: dict[str, Any]) -> int:
    """transformers 5 writes num_local_experts, published checkpoints have num_experts."""
    return hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": 2 * hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "num_moe_experts": experts(hf),
        "moe_router_topk": hf["num_experts_per_tok"],
        # Megatron renormalises by taking the softmax after the choice; with pre_softmax it does not renormalise.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def layer_pattern(hf: dict[str, Any], stages: int) -> str:
    return "|".join(["*E" * (hf["num_hidden_layers"] // stages)] * stages)


def parameters(hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    hidden, dim = hf["hidden_size"], hf["head_dim"]
    heads, groups, width = hf["num_attention_heads"], hf["num_key_value_heads"], hf["moe_intermediate_size"]
    embedding = Vocabulary("model.embed_tokens.weight", (hf["vocab_size"], hidden), slices)
    tied = hf.get("tie_word_embeddings", False)
    table: dict[str, Rule] = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_norm.weight": Split("model.norm.weight", (hidden,)),
        "output_layer.weight": embedding if tied else Vocabulary("lm_head.weight", (hf["vocab_size"], hidden), slices),
    }
    for i in range(hf["num_hidden_layers"]):
        h, attention, moe = f"model.layers.{i}", f"decoder.layers.{2 * i}", f"decoder.layers.{2 * i + 1}"
        a = f"{h}.self_attn"
        table |= {
            f"{attention}.self_attention.linear_qkv.layer_norm_weight": Split(f"{h}.input_layernorm.weight", (hidden,)),
            f"{attention}.self_attention.linear_qkv.weight": GroupedQKV(
                f"{a}.q_proj.weight", f"{a}.k_proj.weight", f"{a}.v_proj.weight", heads, groups, dim, (hidden,)
            ),
            f"{attention}.self_attention.q_layernorm.weight": Split(f"{a}.q_norm.weight", (dim,)),
            f"{attention}.self_attention.k_layernorm.weight": Split(f"{a}.k_norm.weight", (dim,)),
            f"{attention}.self_attention.linear_proj.weight": Split(f"{a}.o_proj.weight", (hidden, heads * dim), 1),
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


def tensors(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in parameters(hf, slices=1).values():
        for piece in rule.pieces("", 0, 1):
            known = shapes.get(piece.tensor, (0,) * len(piece.box.stop))
            shapes[piece.tensor] = tuple(map(max, known, piece.box.stop))
    return shapes
