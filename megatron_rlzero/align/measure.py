"""The two sides as they come, with stock kernels, and with ours: how fast, and how far apart."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from megatron_rlzero.align import documents
from megatron_rlzero.align.check import ONE_RANK, differing
from megatron_rlzero.align.job import AlignError, run_engine, run_learner, with_settings
from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.architectures import read_config
from megatron_rlzero.config import Config

STEPS = 3
HEAD = ["kernels", "tokens sampled per second", "tokens trained on per second", "tokens", "differing", "largest"]


def measure(config: Config, out: Path) -> Outcome:
    """Passed where ours run; where stock kernels cannot, the reason is noted. Times are of a small batch, here."""
    hf = read_config(config.model.path)
    prompts = documents.prompts(hf["vocab_size"], hf["max_position_embeddings"])
    length = max(map(len, prompts)) + documents.NEW + 1
    common = {"prompts": prompts, "new": documents.NEW, "length": length, "sampled": "sample"}
    lines, rows, values = [], [HEAD], {}
    for kernels in ("stock", "aligned"):
        mine, chosen = out / kernels, with_settings(config, ONE_RANK | {"kernels": kernels})
        try:
            run_engine(chosen, mine, [common | {"kind": "sample", "name": "sample", "alone": []}])
            tasks = [common | {"kind": "score", "name": "score"}, {"kind": "time", "name": "time", "steps": STEPS}]
            run_learner(chosen, mine, tasks)
        except AlignError as error:
            if kernels == "aligned":
                raise
            lines.append(f"stock kernels do not run this model here: {str(error).strip().splitlines()[-1]}")
            continue
        sampled, scored = (load_file(mine / f"{name}.safetensors") for name in ("engine-sample", "learner-score"))
        a, b = sampled["together"], scored["log_pi"]
        timed = json.loads((mine / "learner-time.json").read_text())
        speeds = a.numel() / float(sampled["seconds"]), timed["tokens"] / timed["step"]
        n, largest = differing(a, b), float((a - b).abs().max())
        rows.append([kernels, *(f"{x:.0f}" for x in speeds), str(a.numel()), str(n), f"{largest:.1e}"])
        values[kernels] = {"sampled": speeds[0], "trained": speeds[1], "differing": n, "tokens": a.numel()}
        lines.append(f"{kernels}: {n} of {a.numel()} tokens differ between engine and learner, by up to {largest:.1e}")
    return Outcome(True, lines, {f"In {config.model.dtype}": rows}, values)
