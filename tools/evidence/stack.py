"""Long runs on the whole stack, chunk by chunk: every chunk is a start of the product that goes on from a checkpoint.

Between chunks the training prompts are written again at another difficulty, so that pass@1 stays near TARGET. The first
arm leads: the others get its difficulties, and so the same prompts at every update.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from megatron_rlzero import checkpoint
from megatron_rlzero.metrics import read_metrics
from tools.evidence import digits
from tools.evidence.results import ROOT

CHUNK, TARGET, FIRST, GAIN, LAST = 500, 0.55, 3.0, 8.0, 200
#: windows in which pass@1 is looked at
WINDOW = 200


@dataclass(frozen=True)
class Arm:
    """One run: ``overrides`` of the settings that all share."""

    name: str
    updates: int
    overrides: tuple[str, ...] = ()


class Stack:
    """Arms in one directory: their base model, prompts, difficulties and runs."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        """``settings``: the configuration of all arms but for paths; see config.py.

        Paths within the project are written relative to it, where the commands run: another clone can go on.
        """
        out = out.absolute()
        out = self.out = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
        self.config, self.schedule = out / "config.yaml", out / "difficulties.json"
        digits.write(out / "held_out.jsonl", digits.HELD_OUT, digits.LONGEST, "held-out")
        paths = {
            "run_dir": str(out / "run"),
            "model": {"path": str(out / "base")},
            "checkpoint": {"every": CHUNK, "resume": True},
            "eval": {"every": CHUNK, "prompts": digits.HELD_OUT},
            "environment": {
                "kind": "jsonl",
                "path": str(out / "train.jsonl"),
                "eval_path": str(out / "held_out.jsonl"),
            },
        }
        OmegaConf.save(OmegaConf.merge(settings, paths), self.config)
        digits.prepare(self.config, out / "base", out / "random")

    def difficulties(self) -> dict[int, float]:
        """Version at which a chunk begins -> longest prompt."""
        return {int(v): d for v, d in json.loads(self.schedule.read_text())} if self.schedule.exists() else {0: FIRST}

    def version(self, arm: Arm) -> int:
        return checkpoint.resume(self.out / arm.name).version

    def go_on(self, arm: Arm, updates: int, leads: bool) -> None:
        """Trains to ``updates``; one that is there already costs nothing."""
        while (version := self.version(arm)) < updates:
            known = self.difficulties()
            if version not in known and leads:
                reward = np.mean([line["reward/mean"] for line in self.lines(arm)[-LAST:]])
                longest = known[version - CHUNK] + GAIN * (reward - TARGET)
                known[version] = round(float(np.clip(longest, 1.0, digits.LONGEST)), 2)
                self.schedule.write_text(json.dumps(sorted(known.items())))
            digits.write(self.out / "train.jsonl", digits.TRAINING, known[version], "training")
            print(f"{arm.name}: version {version}, prompts of up to {known[version]:.2f} digits", flush=True)
            self.command("log_ratio", arm, f"loop.updates={version + CHUNK}")

    def command(self, module: str, arm: Arm, *overrides: str) -> None:
        """``python -m tools.evidence.MODULE``; its output goes to the arm's log."""
        run = [sys.executable, "-m", f"tools.evidence.{module}", str(self.config), f"run_dir={self.out / arm.name}"]
        with (self.out / f"{arm.name}.log").open("ab") as log:
            done = subprocess.run([*run, *arm.overrides, *overrides], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{arm.name} ended with exit code {done.returncode}; see {log.name}")

    def lines(self, arm: Arm) -> list[dict[str, float]]:
        """The metrics of every update so far."""
        return [line for line in read_metrics(self.out / arm.name) if "reward/mean" in line]

    def held_out(self, arm: Arm) -> list[dict[str, float]]:
        """The evaluations so far."""
        return [line for line in read_metrics(self.out / arm.name) if "eval/sampled" in line]


def columns(lines: list[dict[str, float]]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array([line[name] for line in lines]) for name in lines[-1]}


def in_range(rewards: NDArray[np.float64]) -> float:
    """Share of windows whose pass@1 lies between 0.4 and 0.7."""
    means = rewards[: len(rewards) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)
    return float(((means >= 0.4) & (means <= 0.7)).mean())
