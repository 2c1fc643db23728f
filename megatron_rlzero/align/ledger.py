"""alignment.json: what each step found, whether its gate was passed, and what comes next; and the same as Markdown.

A step's result is kept with a fingerprint of what it was of, the model's files and this package's code: after a change
the step is no longer passed, and has to be run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_rlzero
import megatron_rlzero.kernels as kernels

FILE, REPORT = "alignment.json", "alignment.md"
#: in their order: name -> its phase and the question that its gate answers
STEPS = {
    "proxy": ("Prepare the reference", "is there a model small enough to check here, that computes the same?"),
    "map": ("Prepare the reference", "does every operation that adds numbers up come from kernels/, on both sides?"),
    "measure": ("Prepare the reference", "how fast and how far apart are the two sides, with stock kernels and ours?"),
    "check": (
        "Align and validate",
        "do both sides give the same bits, operator by operator, in every schedule and layout?",
    ),
    "gradcheck": ("Align and validate", "are values, gradients and optimizer step those of transformers in float64?"),
    "profile": ("Optimise", "where does the time go, and is it no more, beside stock kernels, than was accepted?"),
}
#: keeps the profile that later ones are compared with; the numerical gates have to be passed by the same code
ACCEPT, NUMERICAL = "accept", ("check", "gradcheck")


@dataclass
class Outcome:
    """What a step found.

    Attributes:
        passed: whether the gate is open.
        lines: in words, the decisive one first.
        tables: title -> rows of cells, the first the head.
        values: as JSON, for later steps.
    """

    passed: bool
    lines: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """The outcomes of a model's alignment, in ``directory``."""

    def __init__(self, directory: Path, model: Path, family: str) -> None:
        self.directory, self.path = directory, directory / FILE
        self.model, self.family = model, family
        self.steps: dict[str, dict[str, Any]] = {}
        self.accepted: dict[str, Any] = {}
        if self.path.exists():
            kept = json.loads(self.path.read_text())
            if kept["model"] != str(model):
                raise ValueError(f"--out = {directory}: it is of {kept['model']}; choose another directory")
            self.steps, self.accepted = kept["steps"], kept["accepted"]

    def add(self, step: str, outcome: Outcome, fingerprint: str, seconds: float) -> None:
        """Keeps an outcome in the place of an older one; both files are replaced as a whole.

        Args:
            fingerprint: as it was when the step began.
            seconds: that it took.
        """
        self.steps[step] = vars(outcome) | {
            "fingerprint": fingerprint,
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "seconds": round(seconds, 1),
        }
        self._write()

    def accept(self) -> dict[str, Any]:
        """Keeps the last profile's values for comparison, and returns them.

        Raises:
            ValueError: it, or a numerical gate, is not passed by the model and the code as they are now.
        """
        if missing := [step for step in (*NUMERICAL, "profile") if not self.passed(step)]:
            raise ValueError(f"accept: {', '.join(missing)} not passed with this code; run them first")
        self.accepted = self.steps["profile"]["values"]
        self._write()
        return self.accepted

    def _write(self) -> None:
        kept = {"model": str(self.model), "steps": self.steps, "accepted": self.accepted}
        _replace(self.path, json.dumps(kept, indent=2) + "\n")
        _replace(self.directory / REPORT, self.report())

    def passed(self, step: str) -> bool:
        """Whether the gate was passed by the model and the code as they are now."""
        kept = self.steps.get(step)
        return kept is not None and kept["passed"] and kept["fingerprint"] == self.fingerprint()

    def next(self) -> str | None:
        """The first step whose gate is not passed; None where all are."""
        return next((step for step in STEPS if not self.passed(step)), None)

    def fingerprint(self) -> str:
        """Of config.json, the sizes and times of the weights' files, the family's file, and this package's code."""
        digest = hashlib.sha256((self.model / "config.json").read_bytes())
        for path in sorted(self.model.glob("*.safetensors")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        if self.family:
            digest.update(Path(self.family).read_bytes())
        for root in (Path(megatron_rlzero.__file__).parent, Path(kernels.__file__).parent):
            for path in sorted(p for kind in ("*.py", "*.cpp", "*.h") for p in root.rglob(kind)):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def report(self) -> str:
        """The outcomes as Markdown."""
        following = self.next()
        lines = [f"# Alignment of {self.model}", "", f"Next: {following or 'nothing, all gates are passed'}", ""]
        lines += ["| phase | step | gate | passed |", "|---|---|---|---|"]
        for step, (phase, question) in STEPS.items():
            kept = self.steps.get(step)
            state = "-" if kept is None else "no" if not kept["passed"] else "yes"
            state += " (of other files or code)" if state == "yes" and not self.passed(step) else ""
            lines.append(f"| {phase} | {step} | {question} | {state} |")
        for step in STEPS:
            if (kept := self.steps.get(step)) is None:
                continue
            lines += ["", f"## {step}", "", f"{kept['when']}, {kept['machine']}, {kept['seconds']} s", ""]
            lines += [f"- {line}" for line in kept["lines"]]
            for title, rows in kept["tables"].items():
                lines += ["", f"### {title}", ""]
                lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
                lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
        return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)
