"""A small model with random weights that keeps the computation of a large one, and the list of what it reduces.

Kept are the kinds of layers and their order, head sizes and the ratio of query to KV heads, groups, the router with its
top-k, scalings, norms, rotary settings, ties and dtypes. Reduced are counts alone, each to a multiple of what layouts
and slices need. A family outside the package whose config.json has other names for its counts defines ``proxy(hf)``.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.architectures import architecture, language_prefix, read_config
from megatron_rlzero.config import Config

#: parameters up to which a model is its own proxy
SMALL = 20_000_000
#: what counts are reduced to, at most
HIDDEN, VOCABULARY, POSITIONS, KV_HEADS, GROUPS, LAYERS = 256, 1024, 1024, 2, 2, 8
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: settings that hold a layer each, in order
KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def proxy(config: Config, out: Path) -> Outcome:
    """Writes OUT/model; passed where the family supports it. A model of SMALL parameters or fewer is its own."""
    source = Path(config.model.path)
    full = json.loads((source / "config.json").read_text())
    hf = read_config(source)
    family = architecture(hf)
    count = sum(math.prod(shape) for shape in family.tensors(hf).values())
    if count <= SMALL and any(source.glob("*.safetensors")):
        return Outcome(True, [f"{count:,} parameters: the model is its own proxy"], {}, {"model": str(source)})
    if language_prefix(hf):
        return Outcome(False, [f"model_type = {hf['model_type']}: give the language model as a directory of its own"])
    small = getattr(family, "proxy", reduced)(full)
    if faults := family.unsupported(small):
        return Outcome(False, [f"the reduced config.json says {fault}" for fault in faults])
    shapes = family.tensors(small)
    kept = sum(math.prod(shape) for shape in shapes.values())
    if kept > SMALL:
        name = Path(getattr(family, "__file__", "the family's file")).name
        return Outcome(False, [f"{kept:,} parameters are left, of {SMALL:,} at most: define proxy(hf) in {name}"])
    directory = out / "model"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_file(weights(shapes), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(small, indent=2) + "\n")
    changed = {name: (full.get(name), small[name]) for name in small if small[name] != full.get(name)}
    rows = [["setting", "full size", "proxy"], *([n, _short(a), _short(b)] for n, (a, b) in changed.items())]
    lines = [f"{kept:,} of {count:,} parameters, random weights; {len(changed)} settings of {len(full)} are reduced"]
    values = {"model": str(directory), "reduced": {name: list(pair) for name, pair in changed.items()}}
    return Outcome(True, lines, {"What is reduced": rows}, values)


def reduced(hf: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the proxy, for families whose counts have their usual names."""
    small = dict(hf)
    width = min(HIDDEN, hf["hidden_size"])
    ratio = hf["num_attention_heads"] // (hf.get("num_key_value_heads") or hf["num_attention_heads"])
    kv = min(KV_HEADS, hf["num_attention_heads"] // ratio)
    small |= {"hidden_size": width, "num_attention_heads": ratio * kv, "num_key_value_heads": kv}
    small["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    small |= {n: _width(hf[n] * width / hf["hidden_size"]) for n in WIDTHS if hf.get(n)}
    small["vocab_size"] = min(VOCABULARY, hf["vocab_size"])
    small["max_position_embeddings"] = min(POSITIONS, hf["max_position_embeddings"])
    for name in EXPERTS:
        if hf.get(name):  # twice as many as are chosen, in as many groups
            groups = hf.get("n_group") or 1
            chosen = hf["num_experts_per_tok"]
            small[name] = min(hf[name], groups * math.ceil(2 * chosen / groups))
            small[name] += small[name] % 2
    if hf.get("mamba_num_heads"):
        groups = min(GROUPS, hf["n_groups"])
        small |= {"n_groups": groups, "mamba_num_heads": hf["mamba_num_heads"] // hf["n_groups"] * groups}
    small |= {n: None for n in TOKENS if isinstance(hf.get(n), int) and hf[n] >= small["vocab_size"]}
    return small | _layers(hf)


def _width(wanted: float) -> int:
    """A multiple of 64: four slices of a tile each."""
    return max(64, 64 * round(wanted / 64))


def _layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Two where all are alike, else the shortest run that has every kind and, if it can, every two neighbours."""
    given = {name: hf[name] for name in KINDS if hf.get(name)}
    if not given or all(len(set(kinds)) == 1 for kinds in given.values()):
        count = min(2, hf["num_hidden_layers"])
        return {"num_hidden_layers": count} | {name: kinds[:count] for name, kinds in given.items()}
    kinds = next(iter(given.values()))
    pairs = {tuple(kinds[i : i + 2]) for i in range(len(kinds) - 1)}
    start, length = _window(kinds, pairs)
    cut = {name: kinds[start : start + length] for name, kinds in given.items()}
    return cut | ({"num_hidden_layers": length} if "num_hidden_layers" in hf else {})


def _window(kinds: Any, pairs: set[tuple]) -> tuple[int, int]:
    """Start and length of the shortest window that has all pairs; all kinds where that would be over LAYERS."""

    def shortest(whole) -> tuple[int, int]:
        found = ((n, i) for n in range(1, len(kinds) + 1) for i in range(len(kinds) - n + 1) if whole(kinds[i : i + n]))
        length, start = next(found)
        return start, length

    start, length = shortest(lambda some: pairs <= {tuple(some[i : i + 2]) for i in range(len(some) - 1)})
    return (start, length) if length <= LAYERS else shortest(lambda some: set(kinds) <= set(some))


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Random ones under which a norm, a bias, a time step or a decay that is left out would be seen; fp32."""
    draw = torch.Generator().manual_seed(0)
    uniform = {"norm": (0.5, 1.5), "A_log": (0.0, 2.0), ".D": (0.0, 2.0), "dt_bias": (-6.0, 0.0), "bias": (-0.2, 0.2)}
    made = {}
    for name, shape in shapes.items():
        between = next((ends for part, ends in uniform.items() if part in name), None)
        if between is None:
            made[name] = torch.randn(shape, generator=draw) * 1.5 * shape[-1] ** -0.5
        else:
            made[name] = torch.rand(shape, generator=draw) * (between[1] - between[0]) + between[0]
    return made


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
