"""A run of a tiny random model on the whole stack, for tools that watch or disturb it: one directory, its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "quickstart" / "qwen3_moe.yaml"
#: in the environment of the run, and so of everything that it starts
MARK = "MEGATRON_RLZERO_TINY_RUN"
PROMPTS, SIZE = 8, 512


class TinyRun:
    """The quick start's task with a random model, which earns no reward: weight decay moves its weights.

    Attributes:
        process: the launcher of the last start.
        output: what all starts printed.
    """

    def __init__(self, directory: Path, *overrides: str) -> None:
        directory.mkdir(exist_ok=True)
        self.run_dir = directory / "run"
        self.mark = uuid.uuid4().hex
        self.output = directory / "output.log"
        self.process: subprocess.Popen | None = None
        self.overrides = [
            f"run_dir={self.run_dir}",
            f"model.path={make_model(directory / 'model')}",
            "learner.optimizer.weight_decay=0.1",
            f"environment.size={SIZE}",
            f"loop.prompts_per_update={PROMPTS}",
            "rollout.max_response_tokens=32",
            "eval.every=0",
            "eval.prompts=4",
            *overrides,
        ]

    def start(self, updates: int) -> None:
        """Returns at once."""
        command = [sys.executable, "-m", "megatron_rlzero", "train", str(CONFIG), *self.overrides]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, f"loop.updates={updates}"],
                cwd=ROOT,
                env=os.environ | {MARK: self.mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> Iterator[psutil.Process]:
        """All that the run has started and that is alive, whoever its parent is by now."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def find(self, *words: str) -> list[psutil.Process]:
        """Those of the processes whose command line has all the words."""
        return [p for p in self.processes() if all(word in text(p) for word in words)]

    def wait(self, condition: Callable[[], object], seconds: float, step: float = 0.2) -> object:
        """The condition's value as soon as it holds; None after so many seconds, or when the run has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.running():
            if value := condition():
                return value
            time.sleep(step)
        return None

    def updates(self) -> int:
        """The last update in metrics.jsonl; -1 before the first."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["update"]) if lines else -1


def text(process: psutil.Process) -> str:
    """A process's command line; empty where it has gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def make_model(directory: Path) -> Path:
    """The quick start's model with random weights and half its layers."""
    sys.path.insert(0, str(CONFIG.parent))
    import prepare
    from transformers import PreTrainedTokenizerFast

    size = prepare.make_tokenizer(directory)
    end = PreTrainedTokenizerFast.from_pretrained(directory).convert_tokens_to_ids(prepare.END)
    hf = json.loads(CONFIG.with_suffix(".json").read_text())
    prepare.make_model(directory, hf | {"num_hidden_layers": 2}, size, end, seed=0)
    return directory
