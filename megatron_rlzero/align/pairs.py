"""Which module of the learner computes what which module of transformers does, from the parameters they share."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_rlzero.architectures import architecture, language_prefix
from megatron_rlzero.architectures.rules import Split


def pairs(hf: dict[str, Any], reference: nn.Module, slices: int) -> list[tuple[str, str, str]]:
    """(what it is, learner's module, transformers' module) of modules whose outputs are the same, in forward order.

    A parameter that is one tensor of the checkpoint belongs to a module on both sides. Besides them, every layer's
    residual stream: where each layer of transformers is several of Megatron's, the last of them.
    """
    family, modules = architecture(hf), {name for name, _ in reference.named_modules()}
    found = {}
    for parameter, rule in family.parameters(hf, slices).items():
        if not isinstance(rule, Split) or not parameter.startswith("decoder.") or not parameter.endswith(".weight"):
            continue
        learner, theirs = parameter.removesuffix(".weight"), _module(rule.tensor, hf, modules)
        if theirs is not None and not learner.endswith((".router", ".conv1d")):
            found[learner] = theirs
    layers = len(family.layer_pattern(hf, 1))
    stacks = [n for n, m in reference.named_modules() if isinstance(m, nn.ModuleList) and n.endswith("layers")]
    count = len(reference.get_submodule(stacks[0]))
    each = layers // count if layers % count == 0 else 0
    made: list[tuple[str, str, str]] = []
    for layer in range(layers):
        mine = f"decoder.layers.{layer}."
        name = f"layer {layer // each if each else layer}"
        made += [(f"{name}: {a.removeprefix(mine)}", a, b) for a, b in found.items() if a.startswith(mine)]
        if each and (layer + 1) % each == 0:
            made.append((f"{name}: residual stream after it", mine[:-1], f"{stacks[0]}.{layer // each}"))
    return made + [("final norm", a, b) for a, b in found.items() if a == "decoder.final_norm"]


def _module(tensor: str, hf: dict[str, Any], modules: set[str]) -> str | None:
    """The module whose weight is a tensor of the checkpoint; transformers may call the model by another first name."""
    name = tensor.removeprefix(language_prefix(hf)).removesuffix(".weight")
    if name in modules:
        return name
    others = [m for m in modules if m.partition(".")[2] == name.partition(".")[2] and "." in name]
    return others[0] if len(others) == 1 else None
