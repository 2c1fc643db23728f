"""Which settings of a Nemotron-H config.json are implemented; everything else is named, with what would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: layer_types of config.json, with the names that older files have -> Megatron's symbol
SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
_WANTED = {
    "hidden_act": "silu",
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "use_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "use_conv_bias": True,
    "sliding_window": None,
    "residual_in_fp32": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
#: names that transformers translates when it reads config.json -> the ones that it writes
_OLD = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_expand": "expand",
    "mamba_dt_limit": "time_step_limit",
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_COUNT = (_is_count, "a positive integer")
#: what each kind of layer needs to be stated, since the default is of one checkpoint's size
_STATED: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "M": {"mamba_num_heads": _COUNT, "n_groups": _COUNT, "mamba_head_dim": _COUNT, "ssm_state_size": _COUNT},
    "*": {"num_key_value_heads": _COUNT, "head_dim": _COUNT},
    "-": {"intermediate_size": _COUNT},
    "E": {
        "n_routed_experts": _COUNT,
        "num_experts_per_tok": _COUNT,
        "moe_intermediate_size": _COUNT,
        "moe_shared_expert_intermediate_size": _COUNT,
    },
}
#: what may be left out -> its default, and what it has to be
_OPTIONAL: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "conv_kernel": (4, *_COUNT),
    "layer_norm_epsilon": (1e-5, lambda value: _is_number(value) and value > 0, "a positive number"),
    "time_step_min": (0.001, lambda value: _is_number(value) and value >= 0, "a number of at least 0"),
    "routed_scaling_factor": (1.0, lambda value: _is_number(value) and value > 0, "a positive number"),
    "norm_topk_prob": (True, lambda value: isinstance(value, bool), "true or false"),
    "n_group": (1, *_COUNT),
    "topk_group": (1, *_COUNT),
    "moe_latent_size": (None, lambda value: value is None or _is_count(value), "a positive integer, or null"),
}


def pattern(hf: dict[str, Any]) -> str:
    """One of Megatron's symbols for each layer, ? for a kind that is not known; empty if config.json does not say."""
    types = hf.get("layers_block_type") or hf.get("layer_types")
    if isinstance(types, list):
        return "".join(SYMBOLS.get(kind, "?") if isinstance(kind, str) else "?" for kind in types)
    letters = hf.get("hybrid_override_pattern")
    return letters if types is None and isinstance(letters, str) else ""


def unsupported(hf: dict[str, Any]) -> list[str]:
    """Settings that this family's modules do not implement, one line each."""
    faults = [f"{k} = {hf[k]!r}: only {v!r} is supported" for k, v in _WANTED.items() if hf.get(k, v) not in (v, None)]
    faults += [f"{old} = {hf[old]!r}: only the name {new} is supported" for old, new in _OLD.items() if old in hf]
    layers = pattern(hf)
    if not layers or set(layers) - set(_STATED):
        given = {k: hf[k] for k in ("layers_block_type", "layer_types", "hybrid_override_pattern") if hf.get(k)}
        name, kinds = next(iter(given.items()), ("layers_block_type", None))
        known = (
            f"a list of {', '.join(SYMBOLS)}" if name != "hybrid_override_pattern" else f"letters of {''.join(_STATED)}"
        )
        faults.append(f"{name} = {kinds!r}: only {known} is supported")
        return faults
    faults += _contradictions(hf, layers)
    for symbol in sorted(set(layers)):
        faults += [
            f"{k} = {hf.get(k)!r}: only {words} is supported"
            for k, (good, words) in _STATED[symbol].items()
            if not good(hf.get(k))
        ]
    values = {k: hf.get(k, default) for k, (default, _, _) in _OPTIONAL.items()}
    faults += [
        f"{k} = {values[k]!r}: only {words} is supported"
        for k, (_, good, words) in _OPTIONAL.items()
        if not good(values[k])
    ]
    return faults or _divisions(hf | values, layers)


def _contradictions(hf: dict[str, Any], layers: str) -> list[str]:
    faults = []
    letters, count = hf.get("hybrid_override_pattern"), hf.get("num_hidden_layers")
    if letters not in (None, layers):
        faults.append(f"hybrid_override_pattern = {letters!r}: only {layers}, as layers_block_type says, is supported")
    if count not in (None, len(layers)):
        faults.append(f"num_hidden_layers = {count!r}: only {len(layers)}, the number of layer types, is supported")
    return faults


def _divisions(hf: dict[str, Any], layers: str) -> list[str]:
    """Counts that have to go together, each of which is one."""
    faults = []
    if "M" in layers and hf["mamba_num_heads"] % hf["n_groups"]:
        heads, groups = hf["mamba_num_heads"], hf["n_groups"]
        faults.append(f"n_groups = {groups}: only a divisor of mamba_num_heads = {heads} is supported")
    if "E" in layers:
        experts, groups, kept, k = (hf[n] for n in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok"))
        if experts % groups or (groups > 1 and experts // groups < 2):
            faults.append(f"n_group = {groups}: only groups of two or more of the {experts} experts are supported")
        elif kept > groups:
            faults.append(f"topk_group = {kept}: only up to n_group = {groups} is supported")
        elif k > experts // groups * kept:
            faults.append(
                f"num_experts_per_tok = {k}: only up to {experts // groups * kept}, those of the kept groups,"
            )
            faults[-1] += " is supported"
    return faults
