"""Model families: config translation, layer pattern and parameter table, one file each, one registry line each."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

from megatron_rlzero.architectures.rules import Rule
from megatron_rlzero.architectures.trace import TracePoint

#: model_type in config.json -> module of this package
REGISTRY = {
    "llama": "llama",
    "nemotron_h": "nemotron_h",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
KNOWN = tuple(REGISTRY)
#: model_type -> family of a file outside this package
_added: dict[str, Architecture] = {}


class Architecture(Protocol):
    """What a family's module provides, for the dictionary ``hf`` of a config.json.

    Attributes:
        FP32: endings of the Hugging Face tensors that stay fp32 in a bf16 model, on both sides.
        BUFFERS: of those that no gradient trains.
    """

    FP32: tuple[str, ...]
    BUFFERS: tuple[str, ...]

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

    def engine_models(self) -> dict[str, Any]:
        """Class name in config.json -> vLLM model that takes its place, as a class or "module:Class"."""
        ...

    def trace_points(self, hf: dict[str, Any]) -> list[TracePoint]:
        """Operators whose outputs both sides have, in the order of the forward pass."""
        ...

    def rotary(self, hf: dict[str, Any]) -> dict[str, Any] | None:
        """Keyword arguments of kernels.rotary.rotary_table, hashable values; None for attention without positions."""
        ...

    def mixer(self, hf: dict[str, Any]) -> dict[str, Any] | None:
        """Keyword arguments of invariance.megatron_mamba.Mixer; None without Mamba layers."""
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
NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings")
#: the settings that say how many layers there are; one of them is needed
LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers")


def wrong_counts(hf: dict[str, Any]) -> list[str]:
    """A line for each setting of config.json that is missing or no positive integer."""
    needed = NEEDED if any(hf.get(name) for name in LAYERS[:-1]) else (*NEEDED, LAYERS[-1])
    given = [name for name in COUNTS if hf.get(name) is not None or name in needed]
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
    if model_type in _added:
        return _added[model_type]
    if model_type not in REGISTRY:
        known = ", ".join((*KNOWN, *_added))
        raise ValueError(f"model_type = {model_type!r} is not known; known are {known}")
    return import_module(f"{__name__}.{REGISTRY[model_type]}")


def families() -> list[Architecture]:
    """Every known family."""
    return [*(import_module(f"{__name__}.{module}") for module in dict.fromkeys(REGISTRY.values())), *_added.values()]


def add(file: str | Path) -> str:
    """Makes known the family that a Python file defines: MODEL_TYPE and what ``Architecture`` lists; its model_type.

    The file is executed, once in a process.

    Raises:
        ValueError: no such file, or it lacks names.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    name = f"megatron_rlzero_family_{path.stem}"
    if name not in sys.modules or sys.modules[name].__file__ != str(path):
        spec = spec_from_file_location(name, path)
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    module = sys.modules[name]
    needed = (
        {n for n in vars(Architecture) if not n.startswith("_")} | set(Architecture.__annotations__) | {"MODEL_TYPE"}
    )
    if missing := sorted(n for n in needed if not hasattr(module, n)):
        raise ValueError(f"{path} does not define {', '.join(missing)}")
    _added[module.MODEL_TYPE] = module
    return module.MODEL_TYPE


def routed_experts(hf: dict[str, Any]) -> int:
    """Experts of a mixture; 0 for a dense model, and where config.json does not say all that it has to."""
    try:
        return architecture(hf).transformer_config(hf).get("num_moe_experts") or 0
    except (KeyError, TypeError, ValueError):  # preflight.py says what is wrong with it
        return 0
