"""Names of parameters in Megatron-Core's distributed checkpoints, as HybridModel and as GPTModel write them (0.19.2).

HybridModel numbers its layers in the key, and an attention layer and the MLP after it are two layers; GPTModel has
both in one layer, whose number is the first axis of the stored tensor, or stands in the key where layers differ.
Each block of a Mamba layer's projection and convolution has a key of its own (ssm/mamba_mixer.py, sharded_state_dict).
Experts are an axis too, after that of the layers, or stand in the key (``singleton_local_shards``). Grouped and
sequential experts have the same keys. The modules of Megatron's local spec have norms of their own, with names of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

NAMINGS = ("hybrid", "gpt")
#: norms at the start of a layer: name in a linear layer that is fused with it -> name as a module
NORMS = {
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_OTHER_NORM = NORMS | {module: fused for fused, module in NORMS.items()}
_FINAL_NORM = {"hybrid": "decoder.final_norm.weight", "gpt": "decoder.final_layernorm.weight"}
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12])\.weight")
_EXPERT_PARAMETER = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
#: parameters of a Mamba layer that are stored in blocks -> key, endings of the blocks' keys
_MIXER = {
    "mixer.in_proj.weight": ("mixer.in_proj.weight", ("z", "x", "B", "C", "dt")),
    "mixer.conv1d_weight": ("mixer.conv1d.weight", ("x", "B", "C")),
    "mixer.conv1d_bias": ("mixer.conv1d.bias", ("x", "B", "C")),
}
_BLOCKS = {f"{key}.{x}": (name, i) for name, (key, blocks) in _MIXER.items() for i, x in enumerate(blocks)}
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
#: Stored beside the model, and of no use here: training state, and what TransformerEngine's modules keep.
_PASSED_OVER = re.compile(
    r"(chained_\d+\.)?optimizer[./]|.*_extra_state(/|$)|(common_state|rng_state|rerun_state_machine_state"
    r"|opt_param_scheduler|num_floating_point_operations_so_far|iteration|args|checkpoint_version)(/|$|\.)"
)
#: Modules whose TransformerEngine class keeps a state, empty outside fp8, that Megatron asks for when it loads.
_STATEFUL = re.compile(
    r"(.*\.)?(linear_qkv|linear_proj|linear_fc1|linear_fc2|q_layernorm|k_layernorm|pre_mlp_layernorm|final_norm"
    r"|final_layernorm|output_layer|in_proj|out_proj|fc1_latent_proj|fc2_latent_proj)"
)


class Place(NamedTuple):
    """A parameter in a checkpoint: ``key``, and its index in the leading axes, which have sizes ``axes``.

    A parameter of several ``blocks`` is stored in as many tensors, whose keys end with these.
    """

    key: str
    index: tuple[int, ...]
    axes: tuple[int, ...]
    blocks: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [f"{self.key}.{block}" for block in self.blocks] or [self.key]

    @property
    def states(self) -> list[str]:
        """Keys of the states of the parameter's module and of attention, if Megatron asks for any."""
        module = self.key.rpartition(".")[0]
        modules = [module] if _STATEFUL.fullmatch(module) else []
        if module.endswith("self_attention.linear_proj"):
            modules.append(module.removesuffix("linear_proj") + "core_attention")
        index, axes = (".".join(map(str, x)) for x in (self.index or (0,), self.axes or (1,)))
        return [f"{m}._extra_state/shard_{index}_{axes}" for m in modules]


class Found(NamedTuple):
    """A stored tensor: the parameter, how many leading axes its shape has, and which half of [gate; up] or block."""

    parameter: str
    axes: int
    part: int | None


def place(parameter: str, naming: str, layers: int, experts: int) -> Place:
    """Where a HybridModel's parameter goes.

    Args:
        parameter: as in ``Architecture.parameters``, with numbers of the whole model.
        naming: ``hybrid``, or ``gpt`` with all layers alike.
        layers, experts: of the whole model, attention and MLP being one layer.
    """
    if parameter == _FINAL_NORM["hybrid"]:
        return Place(_FINAL_NORM[naming], (), ())
    if not (match := _LAYER.fullmatch(parameter)):
        return Place(parameter, (), ())
    layer, rest = int(match[1]), match[2]
    prefix, index, axes, blocks = (f"decoder.layers.{layer}.", (), (), ())
    if naming == "gpt":
        prefix, index, axes = ("decoder.layers.", (layer // 2,), (layers,))
    if expert := _EXPERT_PARAMETER.fullmatch(rest):
        rest = f"mlp.experts.experts.{expert[1]}.weight"
        index, axes = (*index, int(expert[2])), (*axes, experts)
    elif rest in _MIXER:
        rest, blocks = _MIXER[rest]
    return Place(prefix + rest, index, axes, blocks)


def naming_of(keys: Collection[str]) -> str | None:
    """Whether a HybridModel or a GPTModel has written ``keys``; None if neither has."""
    return next((naming for naming, key in _FINAL_NORM.items() if key in keys), None)


def find(key: str, start: Sequence[int], naming: str, parameters: Collection[str]) -> Found | None:
    """The parameter of a stored chunk that begins at ``start`` of its global tensor; None for an unknown key."""
    part = None
    if match := _HALF.fullmatch(key):
        key, part = match[1], "wv".index(match[2])
    if key == _FINAL_NORM[naming]:
        return Found(_FINAL_NORM["hybrid"], 0, part)
    if not (match := _LAYER.fullmatch(key)):
        return Found(key, 0, part) if key in parameters and key not in _FINAL_NORM.values() else None
    axes, rest = 0, match[2]
    if match[1] is not None:
        layer = int(match[1])
    elif naming == "gpt" and len(start) > 1:
        layer, axes = start[0], 1
    else:
        return None
    if expert := _EXPERT.fullmatch(rest):
        if expert[1] is None and len(start) < axes + 3:
            return None
        number = expert[1] or start[axes]
        axes += expert[1] is None
        rest = f"mlp.experts.{expert[2]}.weight{number}"
    if rest in _BLOCKS:
        rest, part = _BLOCKS[rest]
    elif rest in _MIXER:
        return None
    if naming == "gpt":
        attention = rest.startswith("self_attention.") or rest == NORMS["self_attention.linear_qkv.layer_norm_weight"]
        layer = 2 * layer + (not attention)
    for name in (rest, _OTHER_NORM.get(rest)):
        if f"decoder.layers.{layer}.{name}" in parameters:
            return Found(f"decoder.layers.{layer}.{name}", axes, part)
    return None


def passed_over(key: str) -> bool:
    """Whether a key is of training state and not of the model."""
    return _PASSED_OVER.match(key) is not None
