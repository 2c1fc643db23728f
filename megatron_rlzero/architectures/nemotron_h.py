"""Nemotron-H and Nemotron-3: layers that are Mamba-2, attention, squared-ReLU MLP or a mixture of such experts.

Nemotron-H: A Family of Hybrid Mamba-Transformer Models, NVIDIA, 2025; Nemotron 3 Nano, NVIDIA, 2025. Hugging Face layer
i is Megatron's layer i. Attention has no positions. The time step is at least ``time_step_min``, as in transformers
(NemotronHMamba2Mixer.time_step_limit), which stock vLLM leaves out.
"""

from __future__ import annotations

from math import inf
from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.nemotron_h_settings import pattern, unsupported
from megatron_rlzero.architectures.rules import Blocks, NegativeExp, Rule, Split
from megatron_rlzero.architectures.trace import TracePoint, chosen_by_router

__all__ = ["pattern", "unsupported"]  # defined next door

FP32 = (".A_log", ".D", ".dt_bias", ".e_score_correction_bias")
BUFFERS = (".e_score_correction_bias",)


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    layers = pattern(hf)
    config = {
        "num_layers": len(layers),
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": common.kv_heads(hf),
        "kv_channels": common.head_dim(hf),
        "ffn_hidden_size": hf.get("intermediate_size") or hf["hidden_size"],
        "layernorm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "normalization": "RMSNorm",
        "gated_linear_unit": False,
        "add_bias_linear": False,
        "init_method_std": hf.get("initializer_range", 0.02),
    }
    if "M" in layers:
        config |= {
            "mamba_num_heads": hf["mamba_num_heads"],
            "mamba_head_dim": hf["mamba_head_dim"],
            "mamba_state_dim": hf["ssm_state_size"],
            "mamba_num_groups": hf["n_groups"],
        }
    if "E" in layers:
        groups = hf.get("n_group", 1)
        config |= {
            "num_moe_experts": hf["n_routed_experts"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": hf.get("topk_group", 1) if groups > 1 else None,
            "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),  # see qwen3_moe
            "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
            "moe_latent_size": hf.get("moe_latent_size"),
        }
    return config


def mixer(hf: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of the Mamba mixer beside those in Megatron's configuration; None without Mamba layers.

    The time step's lower bound, after softplus, is that of transformers; there is no upper one.
    """
    if "M" not in pattern(hf):
        return None
    return {"d_conv": hf.get("conv_kernel", 4), "dt_limit": (hf.get("time_step_min", 0.001), inf)}


def engine_models() -> dict[str, Any]:
    return {"NemotronHForCausalLM": "megatron_rlzero.invariance.vllm_nemotron_h:InvariantNemotronH"}


def rotary(hf: dict[str, Any]) -> None:
    """None: attention has no positions."""


def layer_pattern(hf: dict[str, Any], stages: int) -> str:
    return common.layer_pattern(pattern(hf), stages)


def parameters(hf: dict[str, Any], slices: int, prefix: str = "") -> dict[str, Rule]:
    """``prefix``: how the names of the Hugging Face tensors begin."""
    hidden = hf["hidden_size"]
    table = common.ends(hf, slices, *_ends(prefix))
    for i, symbol in enumerate(pattern(hf)):
        h, layer = f"{prefix}backbone.layers.{i}", f"decoder.layers.{i}"
        m, norm = f"{h}.mixer", f"{h}.norm.weight"
        if symbol == "M":
            table |= {f"{layer}.mixer.in_proj.layer_norm_weight": Split(norm, (hidden,))}
            table |= {f"{layer}.mixer.{name}": rule for name, rule in _mamba(hf, m).items()}
            table[f"{layer}.mixer.A_log"] = Split(f"{m}.A_log", (hf["mamba_num_heads"],), 0)
        elif symbol == "*":
            table |= common.attention(hf, i, m, norm)
        elif symbol == "-":
            table |= {f"{layer}.mlp.linear_fc1.layer_norm_weight": Split(norm, (hidden,))}
            table |= _mlp(f"{layer}.mlp.linear_fc1", f"{layer}.mlp.linear_fc2", m, hidden, hf["intermediate_size"])
        else:
            table |= {
                f"{layer}.pre_mlp_layernorm.weight": Split(norm, (hidden,)),
                f"{layer}.mlp.router.weight": Split(f"{m}.gate.weight", (hf["n_routed_experts"], hidden)),
                f"{layer}.mlp.router.expert_bias": _expert_bias(hf, m),
            }
            shared = f"{layer}.mlp.shared_experts.linear_fc"
            table |= _shared(hf, f"{shared}1", f"{shared}2", m) | _latent(hf, f"{layer}.mlp", m)
            for e in range(hf["n_routed_experts"]):
                up, down = _expert(hf, m, e)
                experts = f"{layer}.mlp.experts"
                table |= {f"{experts}.linear_fc1.weight{e}": up, f"{experts}.linear_fc2.weight{e}": down}
    return table


def _ends(prefix: str) -> tuple[str, str, str]:
    return f"{prefix}backbone.embeddings.weight", f"{prefix}backbone.norm_f.weight", f"{prefix}lm_head.weight"


def engine_parameters(hf: dict[str, Any], prefix: str = "") -> dict[str, Rule]:
    """``prefix`` as for ``parameters``."""
    hidden = hf["hidden_size"]
    embedding, norm, head = common.engine_ends(hf, *_ends(prefix)).values()
    table = {"model.embed_tokens.weight": embedding, "model.norm_f.weight": norm, "lm_head.weight": head}
    for i, symbol in enumerate(pattern(hf)):
        h, layer = f"{prefix}backbone.layers.{i}", f"model.layers.{i}"
        m, engine = f"{h}.mixer", f"{layer}.mixer"
        table[f"{layer}.norm.weight"] = Split(f"{h}.norm.weight", (hidden,))
        if symbol == "M":
            names = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
            table |= {f"{engine}.{names.get(name, name)}": rule for name, rule in _mamba(hf, m).items()}
            table[f"{engine}.A"] = NegativeExp(f"{m}.A_log", (hf["mamba_num_heads"],), 0)
        elif symbol == "*":
            table |= common.engine_attention(hf, engine, m)
        elif symbol == "-":
            table |= _mlp(f"{engine}.up_proj", f"{engine}.down_proj", m, hidden, hf["intermediate_size"])
        else:
            table |= {
                f"{engine}.gate.weight": Split(f"{m}.gate.weight", (hf["n_routed_experts"], hidden)),
                f"{engine}.gate.e_score_correction_bias": _expert_bias(hf, m),
            }
            shared = f"{engine}.shared_experts"
            table |= _shared(hf, f"{shared}.up_proj", f"{shared}.down_proj", m) | _latent(hf, engine, m)
            for e in range(hf["n_routed_experts"]):
                up, down = _expert(hf, m, e)
                table |= {f"{engine}.experts.w13_weight.{e}": up, f"{engine}.experts.w2_weight.{e}": down}
    return table


def _mamba(hf: dict[str, Any], module: str) -> dict[str, Rule]:
    """The mixer without A, which the two sides keep in two ways."""
    heads, state = hf["mamba_num_heads"], hf["n_groups"] * hf["ssm_state_size"]
    inner, hidden = heads * hf["mamba_head_dim"], hf["hidden_size"]
    channels = (inner, state, state)
    units = tuple((name, hf[name]) for name in ("mamba_num_heads", "n_groups"))
    return {
        "in_proj.weight": Blocks(f"{module}.in_proj.weight", (inner, *channels, heads), (hidden,), units),
        "conv1d_weight": Blocks(f"{module}.conv1d.weight", channels, (1, hf.get("conv_kernel", 4)), units),
        "conv1d_bias": Blocks(f"{module}.conv1d.bias", channels, (), units),
        "dt_bias": Split(f"{module}.dt_bias", (heads,), 0),
        "D": Split(f"{module}.D", (heads,), 0),
        "norm.weight": Split(f"{module}.norm.weight", (inner,), 0),
        "out_proj.weight": Split(f"{module}.out_proj.weight", (hidden, inner), 1),
    }


def _mlp(up: str, down: str, module: str, hidden: int, width: int) -> dict[str, Rule]:
    return {
        f"{up}.weight": Split(f"{module}.up_proj.weight", (width, hidden), 0),
        f"{down}.weight": Split(f"{module}.down_proj.weight", (hidden, width), 1),
    }


def _shared(hf: dict[str, Any], up: str, down: str, module: str) -> dict[str, Rule]:
    return _mlp(up, down, f"{module}.shared_experts", hf["hidden_size"], hf["moe_shared_expert_intermediate_size"])


def _latent(hf: dict[str, Any], local: str, module: str) -> dict[str, Rule]:
    """Projections of the experts' inputs and outputs, whole on every rank."""
    if not (latent := hf.get("moe_latent_size")):
        return {}
    shapes = {
        "fc1_latent_proj.weight": (latent, hf["hidden_size"]),
        "fc2_latent_proj.weight": (hf["hidden_size"], latent),
    }
    return {f"{local}.{name}": Split(f"{module}.{name}", shape) for name, shape in shapes.items()}


def _expert_bias(hf: dict[str, Any], module: str) -> Rule:
    return Split(f"{module}.gate.e_score_correction_bias", (hf["n_routed_experts"],))


def _expert(hf: dict[str, Any], module: str, expert: int) -> tuple[Rule, Rule]:
    hidden, width = hf.get("moe_latent_size") or hf["hidden_size"], hf["moe_intermediate_size"]
    up, down = (f"{module}.experts.{expert}.{name}_proj.weight" for name in ("up", "down"))
    return Split(up, (width, hidden), 0), Split(down, (hidden, width), 1)


def tensors(hf: dict[str, Any], prefix: str = "") -> dict[str, tuple[int, ...]]:
    return common.tensors(parameters(hf, 1, prefix))


def trace_points(hf: dict[str, Any]) -> list[TracePoint]:
    """Every operator whose output both sides have, in the order of the forward pass."""
    points = []
    for i, symbol in enumerate(pattern(hf)):
        layer, engine = f"decoder.layers.{i}", f"model.layers.{i}.mixer"
        if symbol == "M":
            points += [
                TracePoint(f"layer {i}: norm and projection", f"{layer}.mixer.in_proj", f"{engine}.in_proj"),
                TracePoint(f"layer {i}: convolution, scan and gated norm", f"{layer}.mixer.norm", f"{engine}.norm"),
                TracePoint(f"layer {i}: output projection", f"{layer}.mixer.out_proj", f"{engine}.out_proj"),
            ]
        elif symbol == "*":
            points += common.trace_attention(hf, i, i, engine)
        elif symbol == "-":
            points.append(TracePoint(f"layer {i}: norm and MLP", f"{layer}.mlp", engine))
        else:
            points += [
                TracePoint(f"layer {i}: residual and norm", f"{layer}.pre_mlp_layernorm", f"model.layers.{i}.norm"),
                chosen_by_router(f"layer {i}: router choice", f"{layer}.mlp.router", f"{engine}.router"),
                TracePoint(f"layer {i}: experts", f"{layer}.mlp", engine),
            ]
    return [*points, TracePoint("final norm", "decoder.final_norm", "model.norm_f")]
