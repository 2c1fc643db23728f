"""Where the time goes on both sides, module by module, with our kernels and with stock ones in the same run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_rlzero.align import documents
from megatron_rlzero.align.check import ONE_RANK
from megatron_rlzero.align.job import AlignError, run_engine, run_learner, with_settings
from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.architectures import read_config
from megatron_rlzero.config import Config

STEPS = 5
#: how much larger than accepted a side's time, as a ratio to stock kernels' in the same run, may be: runs differ
GROWTH = 1.5
#: rows of the hot list
HOT = 12


def profile(config: Config, out: Path, accepted: dict[str, Any]) -> Outcome:
    """Passed where neither side is more than GROWTH times slower, beside stock kernels, than in the accepted profile.

    Args:
        accepted: the values of an earlier outcome; empty before the first ``accept``.
    """
    hf = read_config(config.model.path)
    prompts = documents.prompts(hf["vocab_size"], hf["max_position_embeddings"])
    length = max(map(len, prompts)) + documents.NEW + 1
    task = {"kind": "time", "name": "time", "prompts": prompts, "new": documents.NEW, "length": length, "steps": STEPS}
    found: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for kernels in ("aligned", "stock"):
        chosen = with_settings(config, ONE_RANK | {"kernels": kernels})
        try:
            run_engine(chosen, out / kernels, [task])
            run_learner(chosen, out / kernels, [task])
        except AlignError as error:
            if kernels == "aligned":
                raise
            lines.append(f"without stock kernels, which do not run here: {str(error).strip().splitlines()[-1]}")
            continue
        read = lambda side, k=kernels: json.loads((out / k / f"{side}-time.json").read_text())  # noqa: E731
        learner = read("learner")
        found[kernels] = {
            "engine": dict(kinds(read("engine"))),
            "learner, forward": dict(kinds(learner["modules"])),
            "learner, whole step": {"step": learner["step"]},
        }
    ratios = {
        side: sum(times.values()) / sum(found["stock"][side].values())
        for side, times in found["aligned"].items()
        if "stock" in found
    }
    lines += [f"{side}: {ratio:.2f} times the time of stock kernels" for side, ratio in ratios.items()]
    slower = [
        f"{side}: {ratio:.2f} times stock kernels' time, {before:.2f} was accepted; most in {hottest(found, side)}"
        for side, ratio in ratios.items()
        if (before := accepted.get("ratios", {}).get(side)) is not None and ratio > GROWTH * before
    ]
    tables = {f"The {side}'s time": _table(found, side) for side in ("engine", "learner, forward")}
    return Outcome(not slower, slower + lines, tables, {"ratios": ratios, "seconds": found["aligned"]})


def kinds(modules: dict[str, float]) -> Counter[str]:
    """Seconds of all modules that differ in numbers alone."""
    found: Counter[str] = Counter()
    for name, seconds in modules.items():
        found[re.sub(r"\.\d+", ".*", name) or "(model)"] += seconds
    return found


def hottest(found: dict[str, dict[str, Any]], side: str) -> str:
    """The kind of module that loses most time against stock kernels."""
    stock = found["stock"][side]
    return max(found["aligned"][side], key=lambda name: found["aligned"][side][name] - stock.get(name, 0.0))


def _table(found: dict[str, dict[str, Any]], side: str) -> list[list[str]]:
    times, stock = found["aligned"][side], found.get("stock", {}).get(side, {})
    total = sum(times.values())
    rows = [["module", "ms", "share", "ratio to stock"]]
    for name, seconds in sorted(times.items(), key=lambda x: -x[1])[:HOT]:
        ratio = f"{seconds / stock[name]:.2f}" if stock.get(name) else "-"
        rows.append([name, f"{1e3 * seconds:.2f}", f"{seconds / total:.0%}", ratio])
    return rows
