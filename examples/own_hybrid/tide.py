"""Tide, a hybrid of another maker, added from outside the package: the worked example of adding_an_architecture.md.

Its layers do what Nemotron-H's do; its configuration and its tensors have names of their own.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from transformers import AutoConfig, NemotronHConfig

from megatron_rlzero.architectures import nemotron_h
from megatron_rlzero.architectures.rules import Rule

MODEL_TYPE = "tide"
FP32, BUFFERS = nemotron_h.FP32, nemotron_h.BUFFERS
#: setting of Tide's config.json -> Nemotron-H's; vocab_size and the like have the same name in every family
SETTINGS = {
    "state_heads": "mamba_num_heads",
    "state_head_dim": "mamba_head_dim",
    "state_groups": "n_groups",
    "state_size": "ssm_state_size",
    "ffn_size": "intermediate_size",
    "norm_eps": "layer_norm_epsilon",
    "least_time_step": "time_step_min",
}
#: letter of ``blocks``, of which config.json has one for each layer -> kind of layer
KINDS = {"s": "linear_attention", "a": "full_attention", "f": "mlp"}
#: part of Nemotron-H's tensor name -> Tide's
NAMES = {
    r"backbone\.embeddings": "embed",
    r"backbone\.layers": "blocks",
    r"backbone\.norm_f": "out_norm",
    r"lm_head": "head",
    r"\.mixer\.": ".core.",
    r"\.norm\.weight$": ".pre_norm.weight",
    r"\.core\.pre_norm": ".core.norm",  # the norm of the mixer keeps its name
}


def translate(settings: dict[str, Any]) -> dict[str, Any]:
    """Tide's settings in Nemotron-H's words; those that both have stay."""
    result = {SETTINGS.get(name, name): value for name, value in settings.items() if name != "blocks"}
    if "blocks" in settings:
        result["layers_block_type"] = [KINDS.get(letter, letter) for letter in settings["blocks"]]
    return result


def tensor(name: str) -> str:
    """Tide's name of a tensor of Nemotron-H."""
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def _renamed(rule: Rule) -> Rule:
    names = {f.name: getattr(rule, f.name) for f in fields(rule)}
    return replace(rule, **{field: tensor(name) for field, name in names.items() if isinstance(name, str)})


def unsupported(hf: dict[str, Any]) -> list[str]:
    return nemotron_h.unsupported(translate(hf))


def transformer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return nemotron_h.transformer_config(translate(hf))


def mixer(hf: dict[str, Any]) -> dict[str, Any] | None:
    return nemotron_h.mixer(translate(hf))


def rotary(hf: dict[str, Any]) -> None:
    """None: attention has no positions."""


def layer_pattern(hf: dict[str, Any], stages: int) -> str:
    return nemotron_h.layer_pattern(translate(hf), stages)


def parameters(hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    return {name: _renamed(rule) for name, rule in nemotron_h.parameters(translate(hf), slices).items()}


def engine_parameters(hf: dict[str, Any]) -> dict[str, Rule]:
    return {name: _renamed(rule) for name, rule in nemotron_h.engine_parameters(translate(hf)).items()}


def tensors(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {tensor(name): shape for name, shape in nemotron_h.tensors(translate(hf)).items()}


def trace_points(hf: dict[str, Any]) -> list[Any]:
    return nemotron_h.trace_points(translate(hf))


class TideConfig(NemotronHConfig):
    """What vLLM makes of config.json."""

    model_type = MODEL_TYPE

    def __post_init__(self, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in ("blocks", *SETTINGS) if name in kwargs}
        for name, value in translate(given).items():
            setattr(self, name, value)
        super().__post_init__(**kwargs)


AutoConfig.register(MODEL_TYPE, TideConfig, exist_ok=True)


def engine_models() -> dict[str, Any]:
    """vLLM's Nemotron-H under Tide's names."""
    from vllm.model_executor.models.utils import WeightsMapper

    from megatron_rlzero.invariance.vllm_nemotron_h import InvariantNemotronH

    class TideForCausalLM(InvariantNemotronH):
        hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_prefix={
                "embed.": "model.embed_tokens.",
                "blocks.": "model.layers.",
                "out_norm.": "model.norm_f.",
                "head.": "lm_head.",
            },
            orig_to_new_substr={".core.": ".mixer.", ".pre_norm.": ".norm.", "A_log": "A"},
            orig_to_new_stacked=InvariantNemotronH.hf_to_vllm_mapper.orig_to_new_stacked,
        )

    return {"TideForCausalLM": TideForCausalLM}
