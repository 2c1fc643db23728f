"""What dense Qwen3 and Qwen3-MoE share: attention with q/k norms, embedding, output layer, final norm."""

from __future__ import annotations

from typing import Any

from megatron_rlzero.architectures.rules import QKV, GroupedQKV, Rule, Split, Vocabulary
from megatron_rlzero.architectures.trace import TracePoint, in_order_of

#: rows of the engine's embedding are a multiple of this
ENGINE_VOCABULARY = 64


def unsupported(hf: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Settings that differ from ``wanted`` or from what attention implements, one line each."""
    wanted = wanted | {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    faults = [f"{k} = {hf[k]!r}: only {v!r} is supported" for k, v in wanted.items() if hf.get(k, v) not in (v, None)]
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        faults.append(f"rope_type = {rope['rope_type']!r}: only 'default' is supported")
    return faults


def rope_theta(hf: dict[str, Any]) -> float:
    return float((hf.get("rope_parameters") or {}).get("rope_theta") or hf.get("rope_theta") or 1e6)


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": 2 * hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _head(hf: dict[str, Any]) -> str:
    """The output layer's tensor, which a tied one shares with the embedding."""
    return "model.embed_tokens.weight" if hf.get("tie_word_embeddings", False) else "lm_head.weight"


def ends(hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    """Megatron's embedding, final norm and output layer."""
    shape = (hf["vocab_size"], hf["hidden_size"])
    return {
        "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight", shape, slices),
        "decoder.final_norm.weight": Split("model.norm.weight", shape[1:]),
        "output_layer.weight": Vocabulary(_head(hf), shape, slices),
    }


def attention(hf: dict[str, Any], i: int) -> dict[str, Rule]:
    """Megatron's layer 2i, the attention of Hugging Face's layer i."""
    hidden, dim = hf["hidden_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    a, megatron = f"model.layers.{i}.self_attn", f"decoder.layers.{2 * i}.self_attention"
    return {
        f"{megatron}.linear_qkv.layer_norm_weight": Split(f"model.layers.{i}.input_layernorm.weight", (hidden,)),
        f"{megatron}.linear_qkv.weight": GroupedQKV(
            f"{a}.q_proj.weight", f"{a}.k_proj.weight", f"{a}.v_proj.weight", heads, groups, dim, (hidden,)
        ),
        f"{megatron}.q_layernorm.weight": Split(f"{a}.q_norm.weight", (dim,)),
        f"{megatron}.k_layernorm.weight": Split(f"{a}.k_norm.weight", (dim,)),
        f"{megatron}.linear_proj.weight": Split(f"{a}.o_proj.weight", (hidden, heads * dim), 1),
    }


def engine_ends(hf: dict[str, Any]) -> dict[str, Rule]:
    """vLLM's embedding, final norm and output layer."""
    shape = (hf["vocab_size"], hf["hidden_size"])
    return {
        "model.embed_tokens.weight": Vocabulary("model.embed_tokens.weight", shape, 1, ENGINE_VOCABULARY),
        "model.norm.weight": Split("model.norm.weight", shape[1:]),
        "lm_head.weight": Vocabulary(_head(hf), shape, 1, ENGINE_VOCABULARY),
    }


def engine_attention(hf: dict[str, Any], i: int) -> dict[str, Rule]:
    """vLLM's attention of layer i, and the layer's two norms."""
    hidden, dim = hf["hidden_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    layer = f"model.layers.{i}"
    a = f"{layer}.self_attn"
    return {
        f"{layer}.input_layernorm.weight": Split(f"{layer}.input_layernorm.weight", (hidden,)),
        f"{layer}.post_attention_layernorm.weight": Split(f"{layer}.post_attention_layernorm.weight", (hidden,)),
        f"{a}.qkv_proj.weight": QKV(
            f"{a}.q_proj.weight", f"{a}.k_proj.weight", f"{a}.v_proj.weight", heads, groups, dim, (hidden,)
        ),
        f"{a}.q_norm.weight": Split(f"{a}.q_norm.weight", (dim,)),
        f"{a}.k_norm.weight": Split(f"{a}.k_norm.weight", (dim,)),
        f"{a}.o_proj.weight": Split(f"{a}.o_proj.weight", (hidden, heads * dim), 1),
    }


def tensors(parameters: dict[str, Rule]) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor -> shape, from the table for one rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in parameters.values():
        for piece in rule.pieces("", 0, 1):
            known = shapes.get(piece.tensor, (0,) * len(piece.box.stop))
            shapes[piece.tensor] = tuple(map(max, known, piece.box.stop))
    return shapes


#: the last operator before the output layer
TRACE_END = TracePoint("final norm", "decoder.final_norm", "model.norm")


def trace_attention(hf: dict[str, Any], i: int) -> list[TracePoint]:
    """The operators of the attention of Hugging Face's layer i."""
    a, s = f"decoder.layers.{2 * i}.self_attention", f"model.layers.{i}.self_attn"
    projections = tuple(f"{s}.{p}_proj.weight" for p in "qkv")
    in_order = in_order_of(attention(hf, i)[f"{a}.linear_qkv.weight"], projections)
    return [
        TracePoint(f"layer {i}: norm and query, key, value projection", f"{a}.linear_qkv", f"{s}.qkv_proj", in_order),
        TracePoint(f"layer {i}: query norm", f"{a}.q_layernorm", f"{s}.q_norm"),
        TracePoint(f"layer {i}: key norm", f"{a}.k_layernorm", f"{s}.k_norm"),
        TracePoint(f"layer {i}: rotary embedding and attention", f"{a}.core_attention", f"{s}.attn"),
        TracePoint(f"layer {i}: output projection", f"{a}.linear_proj", f"{s}.o_proj"),
    ]
