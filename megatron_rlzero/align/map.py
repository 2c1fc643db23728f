"""Which module computes with which operator, on both sides, and what is left that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rlzero.align import documents
from megatron_rlzero.align.check import ONE_RANK
from megatron_rlzero.align.job import run_engine, run_learner, with_settings
from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.config import Config

#: prompts that are enough to see every module run, prefill and decode
PROMPTS, NEW = 3, 3
#: what the sampler draws a token with: it picks one of the values, and no other side has to pick the same
SAMPLER, DRAWS = "sampler", {"aten::argmax", "aten::max.dim", "aten::topk", "_C::greedy_argmax"}
#: files of an operator that only choose a form
CHOICES = ("dispatch", "gate", "parallel", "ranks", "layout", "buffers", "shard", "cached")


def map_modules(config: Config, out: Path) -> Outcome:
    """Passed where every operation that adds numbers up lies in ``kernels/``."""
    hf = read_config(config.model.path)
    prompts = documents.prompts(hf["vocab_size"], hf["max_position_embeddings"])[1 : PROMPTS + 1]
    task = {"kind": "map", "name": "map", "prompts": prompts, "new": NEW}
    task["length"] = max(map(len, prompts)) + NEW + 1
    run_engine(config, out, [task])
    run_learner(with_settings(config, ONE_RANK), out, [task])
    found = {side: json.loads((out / f"{side}-map.json").read_text()) for side in ("learner", "engine")}
    draws = found["engine"][SAMPLER]["foreign"]
    found["engine"][SAMPLER]["foreign"] = {name: n for name, n in draws.items() if name not in DRAWS}
    lines = [
        f"{side}: {name} ({seen['dtype']} {seen['shape']}) computes with {', '.join(seen['foreign'])}: not ours"
        for side, modules in found.items()
        for name, seen in modules.items()
        if seen["foreign"]
    ]
    foreign = len(lines)
    tables = {f"The {side}'s modules": _table(modules) for side, modules in found.items()}
    tables["Operators that both sides have"] = _points(hf, found)
    if not lines:
        lines = [
            f"{len(found['learner'])} modules of the learner and {len(found['engine'])} of the engine compute with ours"
        ]
    return Outcome(not foreign, lines, tables, {"modules": {side: len(m) for side, m in found.items()}})


def kernels(seen: dict[str, Any]) -> str:
    """The operators of a module in words, with the form that computed."""
    forms = {name: [f for f in files if f not in CHOICES] for name, files in seen["operators"].items()}
    return ", ".join(f"{name} ({', '.join(files)})" if files else name for name, files in forms.items())


def _table(modules: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = [["module", "operators of kernels/", "elementwise, from elsewhere", "not ours", "result"]]
    for name, seen in modules.items():
        others = [", ".join(op.removeprefix("aten::") for op in seen[kind]) for kind in ("elementwise", "foreign")]
        rows.append([name or "(model)", kernels(seen), *others, f"{seen['dtype']} {seen['shape']}"])
    return rows


def _points(hf: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """For every operator that the comparison knows, what computes it on either side, with the modules inside it."""
    rows = [["operator", "learner", "engine"]]
    for point in architecture(hf).trace_points(hf):
        cells = []
        for side, module in (("learner", point.learner), ("engine", point.engine)):
            inside = [s for n, s in found[side].items() if n == module or n.startswith(f"{module}.")]
            cells.append(", ".join(dict.fromkeys(kernels(s) for s in inside if s["operators"])))
        rows.append([point.name, *cells])
    return rows
