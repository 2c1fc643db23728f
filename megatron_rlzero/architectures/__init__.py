"""Model families: config translation, layer pattern and parameter table, one file each, one registry line each."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from megatron_rlzero.architectures.rules import Rule
from megatron_rlzero.architectures.trace import TracePoint

#: model_type in config.json -> module of this package
REGISTRY = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
KNOWN = tuple(REGISTRY)


class Architecture(Protocol):
    """What a family's module provides, for the dictionary ``hf`` of a config.json."""

    def unsupported(self, hf: dict[str, Any]) -> list[str]:
        """Lines that name the settings of this checkpoint which the family does not implement."""
        ...

    def transformer_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of Megatron's TransformerConfig that describe the model."""
        ...

    def layer_pattern(self, hf: dict[str, Any], stages: int) -> str:
        """Megatron's hybrid layer pattern with its pipeline cuts; ValueError if a stage would be empty."""
        ...

    def parameters(self, hf: dict[str, Any], slices: int) -> dict[str, Rule]:
        """Megatron parameter, named with global layer and expert numbers -> rule; ``slices`` pads the vocabulary."""
        ...

    def engine_parameters(self, hf: dict[str, Any]) -> dict[str, Rule]:
        """vLLM parameter -> rule; of stacked experts each one, with its number in the whole model at the end."""
        ...

    def tensors(self, hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Hugging Face tensor -> shape, of the whole checkpoint."""
        ...

    def trace_points(self, hf: dict[str, Any]) -> list[TracePoint]:
        """Operators whose outputs both sides have, in the order of the forward pass."""
        ...

    def rotary(self, hf: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of kernels.rotary.rotary_table that describe the rotary embedding; hashable values."""
        ...


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face directory."""
    return json.loads((Path(directory) / "config.json").read_text())


#: settings that count something, of any family
COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
#: of these, what every family needs
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def wrong_counts(hf: dict[str, Any]) -> list[str]:
    """A line for each setting of config.json that is missing or no positive integer."""
    given = [name for name in COUNTS if hf.get(name) is not None or name in NEEDED]
    return [
        f"{name} = {hf.get(name)!r}: not a positive integer"
        for name in given
        if not isinstance(hf.get(name), int) or isinstance(hf[name], bool) or hf[name] < 1
    ]


def architecture(hf: dict[str, Any]) -> Architecture:
    """The family of a config.json.

    Raises:
        ValueError: for a model_type that is not in the registry; lists those that are.
    """
    model_type = hf.get("model_type")
    if model_type not in REGISTRY:
        raise ValueError(f"model_type = {model_type!r} is not known; known are {', '.join(KNOWN)}")
    return import_module(f"{__name__}.{REGISTRY[model_type]}")
