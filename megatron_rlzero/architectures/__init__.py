"""Model families: config translation, layer pattern and parameter table, one file each, one registry line each."""

from __future__ import annotations

import json
import sys
from importlib import import_module
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
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_omni",
}
KNOWN = tuple(REGISTRY)
#: model_type of a model that has more than a language model -> see ``language_prefix``
WRAPPERS = {"NemotronH_Nano_Omni_Reasoning_V3": "language_model."}
#: model_type -> family of a file outside this package
_added: dict[str, Architecture] = {}


class Architecture(Protocol):
    """What a family's module provides, for the dictionary ``hf`` of a config.json, see ``language_settings``.

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
    """``language_settings`` of the config.json of a Hugging Face directory."""
    return language_settings(json.loads((Path(directory) / "config.json").read_text()))


def language_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json; of a wrapper those of its language model, with the wrapper's model_type."""
    settings = language_model(config)
    return settings if settings is config else settings | {"model_type": config["model_type"]}


def language_prefix(hf: dict[str, Any]) -> str:
    """How the names of the language model's tensors begin in a wrapper, whose other tensors are carried along."""
    return WRAPPERS.get(hf["model_type"], "")


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The dictionary in a config.json that describes the language model: all of it but for a wrapper's."""
    if config.get("model_type") in WRAPPERS:
        for name in ("llm_config", "text_config"):
            if isinstance(config.get(name), dict):
                return config[name]
    return config


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

    It is imported under its own name, with its directory on the path, so that processes that receive objects of its
    classes find them.

    Raises:
        ValueError: no such file, it cannot be imported, another module has its name, or it lacks names.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = import_module(path.stem)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if Path(module.__file__ or "").resolve() != path:
        raise ValueError(f"{path}: {path.stem} is also the name of {module.__file__}; rename the file")
    needed = {n for n in (*vars(Architecture), *Architecture.__annotations__) if not n.startswith("_")} | {"MODEL_TYPE"}
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
