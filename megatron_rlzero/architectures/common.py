"""What the families share: attention with or without biases and q/k norms, embedding, output layer, norms, layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from megatron_rlzero.architectures.rules import QKV, GroupedQKV, Rule, Split, Vocabulary
from megatron_rlzero.architectures.trace import TracePoint, in_order_of

#: rows of the engine's embedding are a multiple of this
ENGINE_VOCABULARY = 64
#: no tensor of a decoder without Mamba layers stays fp32 in a bf16 model, and each is trained
FP32 = BUFFERS = ()
#: settings that every family has at these values alone
WANTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "quantization_config": None,
}
#: what rope_type = llama3 needs, in the order of kernels.rotary.Llama3Scaling
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def unsupported(hf: dict[str, Any], wanted: dict[str, Any], stated: Sequence[str] = ()) -> list[str]:
    """Settings that differ from ``wanted`` or from what attention implements, one line each.

    Args:
        stated: settings for which config.json has to give a value, since their default is of one checkpoint's size.
    """
    wanted = WANTED | wanted
    faults = [f"{k} = {hf[k]!r}: only {v!r} is supported" for k, v in wanted.items() if hf.get(k, v) not in (v, None)]
    faults += [f"{k} = {hf.get(k)!r}: only a stated value is supported" for k in stated if hf.get(k) is None]
    if others := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        faults.append(f"layer_types = {', '.join(others)}: only 'full_attention' is supported")
    rope = _rope(hf)
    if _rope_type(rope) not in ("default", "llama3"):
        faults.append(f"rope_type = {_rope_type(rope)!r}: only 'default' or 'llama3' is supported")
    elif _rope_type(rope) == "llama3":
        missing = [k for k in LLAMA3 if not isinstance(rope.get(k), int | float) or rope[k] <= 0]
        faults += [f"{k} = {rope.get(k)!r} in llama3 scaling: only a positive number is supported" for k in missing]
        if not missing and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            faults.append(
                f"low_freq_factor = {rope['low_freq_factor']}: only one below high_freq_factor = "
                f"{rope['high_freq_factor']} is supported"
            )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        faults.append(f"partial_rotary_factor = {rope['partial_rotary_factor']!r}: only 1.0 is supported")
    return faults


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"  # older files say type


def rotary(hf: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of kernels.rotary.rotary_table, hashable."""
    rope = _rope(hf)
    arguments: dict[str, Any] = {"base": float(rope.get("rope_theta") or hf.get("rope_theta") or 1e4)}
    if _rope_type(rope) == "llama3":
        arguments["scaling"] = tuple(float(rope[k]) for k in LLAMA3)
    return arguments


def no_mixer(hf: dict[str, Any]) -> None:
    """None: there are no Mamba layers."""


def no_engine_models() -> dict[str, Any]:
    """None: vLLM's own model has layers that this project replaces one by one."""
    return {}


def head_dim(hf: dict[str, Any]) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def kv_heads(hf: dict[str, Any]) -> int:
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def transformer_config(hf: dict[str, Any], *, qk_norm: bool, qkv_bias: bool) -> dict[str, Any]:
    return {
        "num_layers": 2 * hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": kv_heads(hf),
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": qk_norm,
        "add_qkv_bias": qkv_bias,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def layer_pattern(layers: Sequence[str], stages: int) -> str:
    """Megatron's pattern of ``layers``, of one symbol or more each: stage s of n has L s / n up to L (s + 1) / n.

    Raises:
        ValueError: a stage would be empty.
    """
    if not 1 <= stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be cut into {stages} pipeline stages, each of one layer or more")
    first = [-(-s * len(layers) // stages) for s in range(stages + 1)]
    return "|".join("".join(layers[a:b]) for a, b in pairwise(first))


def ends(
    hf: dict[str, Any],
    slices: int,
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
    head: str = "lm_head.weight",
) -> dict[str, Rule]:
    """Megatron's embedding, final norm and output layer."""
    shape = (hf["vocab_size"], hf["hidden_size"])
    head = embedding if hf.get("tie_word_embeddings", False) else head
    return {
        "embedding.word_embeddings.weight": Vocabulary(embedding, shape, slices),
        "decoder.final_norm.weight": Split(norm, shape[1:]),
        "output_layer.weight": Vocabulary(head, shape, slices),
    }


def attention(
    hf: dict[str, Any], layer: int, module: str, norm: str, *, qk_norm: bool = False, qkv_bias: bool = False
) -> dict[str, Rule]:
    """The attention that is Megatron's layer ``layer``; Hugging Face's ``module`` after the norm of weight ``norm``."""
    hidden, dim = hf["hidden_size"], head_dim(hf)
    megatron = f"decoder.layers.{layer}.self_attention"
    table: dict[str, Rule] = {
        f"{megatron}.linear_qkv.layer_norm_weight": Split(norm, (hidden,)),
        f"{megatron}.linear_qkv.weight": _qkv(GroupedQKV, hf, f"{module}.{{}}_proj.weight", (hidden,)),
        f"{megatron}.linear_proj.weight": Split(
            f"{module}.o_proj.weight", (hidden, hf["num_attention_heads"] * dim), 1
        ),
    }
    if qkv_bias:
        table[f"{megatron}.linear_qkv.bias"] = _qkv(GroupedQKV, hf, f"{module}.{{}}_proj.bias", ())
    if qk_norm:
        table |= {f"{megatron}.{x}_layernorm.weight": Split(f"{module}.{x}_norm.weight", (dim,)) for x in "qk"}
    return table


def _qkv(kind: type[GroupedQKV], hf: dict[str, Any], tensor: str, rest: tuple[int, ...]) -> GroupedQKV:
    query, key, value = (tensor.format(x) for x in "qkv")
    return kind(query, key, value, hf["num_attention_heads"], kv_heads(hf), head_dim(hf), rest)


def engine_ends(hf: dict[str, Any], *names: str) -> dict[str, Rule]:
    """vLLM's embedding, final norm and output layer; ``names`` as in ``ends``."""
    embedding, norm, head = ends(hf, 1, *names).values()
    return {
        "model.embed_tokens.weight": replace(embedding, block=ENGINE_VOCABULARY),
        "model.norm.weight": norm,
        "lm_head.weight": replace(head, block=ENGINE_VOCABULARY),
    }


def engine_attention(
    hf: dict[str, Any], engine: str, module: str, *, qk_norm: bool = False, qkv_bias: bool = False
) -> dict[str, Rule]:
    """vLLM's attention in its module ``engine``; Hugging Face's is ``module``."""
    hidden, dim = hf["hidden_size"], head_dim(hf)
    table: dict[str, Rule] = {
        f"{engine}.qkv_proj.weight": _qkv(QKV, hf, f"{module}.{{}}_proj.weight", (hidden,)),
        f"{engine}.o_proj.weight": Split(f"{module}.o_proj.weight", (hidden, hf["num_attention_heads"] * dim), 1),
    }
    if qkv_bias:
        table[f"{engine}.qkv_proj.bias"] = _qkv(QKV, hf, f"{module}.{{}}_proj.bias", ())
    if qk_norm:
        table |= {f"{engine}.{x}_norm.weight": Split(f"{module}.{x}_norm.weight", (dim,)) for x in "qk"}
    return table


def engine_norms(hf: dict[str, Any], layer: str) -> dict[str, Rule]:
    """vLLM's norms before attention and MLP, of the same names as Hugging Face's."""
    names = (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight")
    return {name: Split(name, (hf["hidden_size"],)) for name in names}


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


def trace_attention(hf: dict[str, Any], i: int, layer: int, engine: str, *, qk_norm: bool = False) -> list[TracePoint]:
    """The operators of the attention of Hugging Face's layer i, Megatron's ``layer`` and vLLM's module ``engine``."""
    megatron = f"decoder.layers.{layer}.self_attention"
    in_order = in_order_of(_qkv(GroupedQKV, hf, "{}", (hf["hidden_size"],)), ("q", "k", "v"))
    norms = [
        TracePoint(f"layer {i}: query norm", f"{megatron}.q_layernorm", f"{engine}.q_norm"),
        TracePoint(f"layer {i}: key norm", f"{megatron}.k_layernorm", f"{engine}.k_norm"),
    ]
    projection = f"layer {i}: norm and query, key, value projection"
    return [
        TracePoint(projection, f"{megatron}.linear_qkv", f"{engine}.qkv_proj", in_order),
        *(norms if qk_norm else ()),
        TracePoint(f"layer {i}: attention", f"{megatron}.core_attention", f"{engine}.attn"),
        TracePoint(f"layer {i}: output projection", f"{megatron}.linear_proj", f"{engine}.o_proj"),
    ]
