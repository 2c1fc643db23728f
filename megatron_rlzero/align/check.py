"""Forward on both sides: operator by operator, then the bits of log-probs over schedules and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rlzero.align import documents
from megatron_rlzero.align.causes import causes
from megatron_rlzero.align.job import Task, run_engine, run_learner, with_settings
from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.align.ties import with_ties
from megatron_rlzero.architectures import architecture, read_config, routed_experts
from megatron_rlzero.config import Config

DTYPES = ("fp32", "bf16")
CHUNK = 64
TENSOR, PIPELINE, EXPERT = (f"learner.{x}_model_parallel_size" for x in ("tensor", "pipeline", "expert"))
ONE_RANK = {"learner.world_size": 1, TENSOR: 1, PIPELINE: 1, EXPERT: 1}


def layouts(hf: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Layouts of two learner ranks that this model allows: name -> sizes."""
    experts, family = routed_experts(hf), architecture(hf)
    found = {}
    if hf["num_attention_heads"] % 2 == 0:
        ep = 2 if experts and experts % 2 == 0 else 1
        found["TP2 x EP2" if ep == 2 else "TP2"] = ONE_RANK | {"learner.world_size": 2, TENSOR: 2, EXPERT: ep}
    if len(family.layer_pattern(hf, 1)) > 1:
        found["PP2"] = ONE_RANK | {"learner.world_size": 2, PIPELINE: 2}
    return found


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose fp32 values differ in a byte."""
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def check(config: Config, out: Path) -> Outcome:
    """Runs both sides and compares them; passed where no byte differs and the controls do."""
    hf = read_config(config.model.path)
    prompts = documents.prompts(hf["vocab_size"], hf["max_position_embeddings"])
    length = max(map(len, prompts)) + documents.NEW + 1
    common: Task = {"prompts": prompts, "new": documents.NEW, "length": length}
    alone = list(range(0, len(prompts), max(len(prompts) // documents.ALONE, 1)))
    cached = architecture(hf).mixer(hf) is None
    ties = with_ties(config.model.path, out / "ties", hf)

    engine: list[Task] = []
    learner: list[Task] = []
    for dtype in DTYPES:
        settings = {"model.dtype": dtype}
        whole = common | {"kind": "sample", "settings": settings}
        engine += [
            common | {"kind": "trace", "name": f"trace-{dtype}", "settings": settings},
            whole | {"name": f"whole-{dtype}", "alone": alone},
            whole | {"name": f"chunks-{dtype}", "alone": [], "chunk": CHUNK, "cached": cached},
        ]
        score = common | {"kind": "score", "sampled": f"whole-{dtype}"}
        learner += [
            common | {"kind": "trace", "name": f"trace-{dtype}", "settings": settings},
            score | {"name": f"packed-{dtype}", "settings": settings},
            score | {"name": f"other-{dtype}", "settings": settings | {"learner.max_tokens_per_microbatch": length}},
        ]
    slices = config.reduction_slices // 2 or 2
    learner.append(learner[1] | {"name": "control", "settings": {"model.dtype": DTYPES[0], "reduction_slices": slices}})
    if ties is not None:
        tied = common | {"kind": "trace", "name": "trace-ties"}
        tied["settings"] = {"model.dtype": DTYPES[0], "model.path": str(ties)}
        engine.append(tied)
        learner.append(tied)
    run_engine(config, out, engine)
    run_learner(with_settings(config, ONE_RANK), out, learner)

    traces = [f"trace-{dtype}" for dtype in DTYPES] + (["trace-ties"] if ties is not None else [])
    names = [point.name for point in architecture(hf).trace_points(hf)]
    found = {name: first_difference(out, name, names) for name in traces}
    rows = _schedules(out, alone)
    two = layouts(hf)
    for name, sizes in two.items():
        tasks = [
            common
            | {"kind": "score", "sampled": f"whole-{dtype}", "name": f"{name}-{dtype}"}
            | {"settings": sizes | {"model.dtype": dtype}}
            for dtype in DTYPES
        ]
        run_learner(with_settings(config, sizes), out, tasks)
        rows += [
            (f"learner {name} = engine, {d}", *_compare(out, f"learner-{name}-{d}", f"engine-whole-{d}"))
            for d in DTYPES
        ]
    if any("TP2" in name for name in two):
        parallel = with_settings(config, {"rollout.tensor_model_parallel_size": 2})
        task = common | {"kind": "sample", "alone": [], "name": "tp2", "settings": {"model.dtype": DTYPES[1]}}
        run_engine(parallel, out, [task])
        rows.append((f"engine TP2 = TP1, {DTYPES[1]}", *_compare(out, "engine-tp2", f"engine-whole-{DTYPES[1]}")))
    control = _compare(out, "learner-control", f"engine-whole-{DTYPES[0]}")
    return _outcome(found, rows, control, len(names))


def first_difference(out: Path, name: str, names: Sequence[str]) -> list[str]:
    """The operators of a trace with a differing byte, in forward order."""
    learner, engine = (load_file(out / f"{side}-{name}.safetensors") for side in ("learner", "engine"))
    return [n for n in names if not torch.equal(learner[n].view(torch.uint8), engine[n].view(torch.uint8))]


def _schedules(out: Path, alone: list[int]) -> list[tuple]:
    rows = []
    for dtype in DTYPES:
        whole = load_file(out / f"engine-whole-{dtype}.safetensors")
        chunks = load_file(out / f"engine-chunks-{dtype}.safetensors")
        together = whole["together"]
        pairs = {
            "engine: all at once = one at a time": (together[alone], whole["alone"][alone]),
            "engine: decode = prefill": (together, whole["prefill"]),
            f"engine: whole prefills = steps of {CHUNK} tokens": (together, chunks["together"]),
            f"engine: the same, as a prefill in steps of {CHUNK}": (together, chunks["prefill"]),
        }
        rows += [(f"{what}, {dtype}", a.numel(), differing(a, b)) for what, (a, b) in pairs.items()]
        rows.append((f"learner = engine, {dtype}", *_compare(out, f"learner-packed-{dtype}", f"engine-whole-{dtype}")))
        other = _compare(out, f"learner-other-{dtype}", f"engine-whole-{dtype}")
        rows.append((f"learner in other microbatches = engine, {dtype}", *other))
    return rows


def _compare(out: Path, one: str, other: str) -> tuple[int, int]:
    """Tokens compared, and those that differ."""
    a, b = (load_file(out / f"{name}.safetensors") for name in (one, other))
    a, b = (x["log_pi"] if "log_pi" in x else x["together"] for x in (a, b))
    return a.numel(), differing(a, b)


def _outcome(found: dict[str, list[str]], rows: list[tuple], control: tuple[int, int], operators: int) -> Outcome:
    lines = []
    for name, differ in found.items():
        if differ:
            lines.append(
                f"{name}: the first operator that differs is {differ[0]} ({len(differ)} of {operators} differ)"
            )
            lines.append(f"look at: {causes(differ[0])}")
    lines += [f"{what}: {n} of {tokens} tokens differ" for what, tokens, n in rows if n]
    tokens, n = control
    if not n:
        lines.append(f"the control differs in no token: {tokens} tokens with another number of slices are the same")
    passed = not lines
    total = sum(tokens for _, tokens, _ in rows)
    if passed:
        lines = [f"0 of {total} tokens and 0 of {operators} operators differ; of the control {n} of {tokens} do"]
    table = [["comparison", "tokens", "differing"], *([what, str(tokens), str(n)] for what, tokens, n in rows)]
    table.append(["control: another number of slices", str(control[0]), str(control[1])])
    first = {name: differ[0] for name, differ in found.items() if differ}
    return Outcome(passed, lines, {"Bits": table}, {"first": first, "tokens": total})
