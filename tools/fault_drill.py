"""Trains while processes are killed at random, resumes, and proves that nothing was lost, used twice or left behind.

Usage: python tools/fault_drill.py [--minutes 30] [--every 60] [--seed 0] [--report FILE.json]. A tiny model, two
learner ranks, two servers, at most four versions of lag. Every so many seconds of training one of KINDS is killed with
SIGKILL, each kind once before any comes again. A run that ends is started again, from its last whole checkpoint; the
last one is left to end by itself. Exit code 0 if all of ``verify`` holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "quickstart" / "qwen3_moe.yaml"
#: in the environment of the run, and so of everything that it starts
MARK = "MEGATRON_RLZERO_DRILL"
KINDS = ("server", "whole run", "during refit", "during checkpoint", "worker", "learner rank", "client")
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
PROMPTS, SIZE, LAG, LAST = 8, 512, 4, 6
#: seconds in which nothing may be left of a run that was killed, and in which a kind of kill finds its moment
GONE_S, MOMENT_S = 20.0, 60.0


class Drill:
    """One run directory and the processes on it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.run_dir = directory / "run"
        self.random = random.Random(seed)
        self.mark = uuid.uuid4().hex
        self.faults: list[str] = []
        self.kills: list[dict] = []
        self.starts: list[int] = []
        self.process: subprocess.Popen | None = None
        self.output = (directory / "output.log").open("ab")
        self.overrides = [
            f"run_dir={self.run_dir}",
            f"model.path={_model(directory / 'model')}",
            "learner.world_size=2",
            "learner.optimizer.weight_decay=0.1",  # a random model earns no reward: this is what moves its weights
            f"environment.size={SIZE}",
            f"loop.prompts_per_update={PROMPTS}",
            f"loop.max_lag={LAG}",
            "loop.record_every=1",
            "rollout.servers=2",
            "rollout.max_restarts=1000000",
            "rollout.max_response_tokens=32",
            "refit.deadline_s=20",
            "checkpoint.every=3",
            "checkpoint.resume=true",
            "eval.every=0",
            "eval.prompts=4",
        ]

    def start(self, updates: int) -> None:
        """Starts the run where its last whole checkpoint is, and reads all of that first."""
        from megatron_rlzero import checkpoint
        from megatron_rlzero.resharding.safetensors_files import SafetensorsReader

        for path in checkpoint.whole(self.run_dir):
            try:
                SafetensorsReader(checkpoint.read(path).learner)
            except ValueError as error:
                self.faults.append(f"{path.name} counts as whole: {error}")
        self.starts.append(checkpoint.resume(self.run_dir).version)
        command = [sys.executable, "-m", "megatron_rlzero", "train", str(CONFIG), *self.overrides]
        self.process = subprocess.Popen(
            [*command, f"loop.updates={updates}"],
            cwd=ROOT,
            env=os.environ | {MARK: self.mark},
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.progress_at_start = self.lines()

    def lines(self) -> int:
        """Bytes of metrics: more than at the start once the run trains."""
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def processes(self) -> Iterator[psutil.Process]:
        """All that the run has started and that is alive, whoever its parent is by now."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def find(self, *words: str) -> list[psutil.Process]:
        return [p for p in self.processes() if all(word in _text(p) for word in words)]

    def wait(self, condition: Callable[[], object], seconds: float, step: float = 0.2) -> object:
        """The condition's value as soon as it holds; None after so many seconds, or when the run has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if value := condition():
                return value
            time.sleep(step)
        return None

    def kill(self, kind: str) -> None:
        """One kill of this kind, as soon as its moment has come; and what has to follow from it."""
        victim = None
        match kind:
            case "server":
                victim = self._any(self.find("vllm.entrypoints"))
            case "worker":
                servers = {p.pid for p in self.find("vllm.entrypoints")}
                victim = self._any([p for p in self.processes() if p.ppid() in servers])
            case "learner rank":
                victim = self._any([p for p in self.find("megatron_rlzero", "train") if p.pid != self.process.pid])
            case "client":
                victim = self._any(self.find("generation.client"))
            case "during refit":
                victim = self.wait(self._paused, MOMENT_S, step=0.002)
            case "during checkpoint":
                victim = self.wait(self._writing, MOMENT_S, step=0.001) and psutil.Process(self.process.pid)
            case _:
                victim = psutil.Process(self.process.pid)
        if victim is None:
            print(f"  {kind}: its moment did not come", flush=True)
            return
        ends = victim.pid == self.process.pid
        os.killpg(victim.pid, signal.SIGKILL) if ends else victim.kill()
        self.kills.append({"kind": kind, "update": self.updates()})
        print(f"  killed: {kind} (pid {victim.pid}) after update {self.updates()}", flush=True)
        if ends or kind in ("learner rank", "client"):
            self.ended()

    def ended(self) -> None:
        """The run is over: within GONE_S nothing of it is left."""
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.faults.append(f"the launcher runs on {GONE_S} s after the last kill")
            os.killpg(self.process.pid, signal.SIGKILL)
        end = time.monotonic() + GONE_S
        while left := list(self.processes()):
            if time.monotonic() > end:
                self.faults.append(f"left behind: {[(p.pid, _text(p)[:80]) for p in left]}")
                break
            time.sleep(0.2)

    def updates(self) -> int:
        """The last update in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return int(json.loads(lines[-1])["update"]) if lines else -1

    def _any(self, found: list[psutil.Process]) -> psutil.Process | None:
        return self.random.choice(found) if found else None

    def _paused(self) -> psutil.Process | None:
        """A server that has stopped for the swap of its weights at this moment; its log says so."""
        for log in self.run_dir.glob("server-*.log"):
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - 2000, 0))
                text = file.read().decode(errors="replace")
            if text.rfind("pause state to PAUSED") > text.rfind("pause state to UNPAUSED"):
                for process in self.find("vllm.entrypoints"):
                    if any(file.path == str(log) for file in process.open_files()) or _logs_to(process, log):
                        return process
        return None

    def _writing(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("*.partial"))

    def verify(self, updates: int) -> None:
        """Every prompt once, in its update; versions within the bound and in order; nothing half written is left."""
        from megatron_rlzero.generation.schedule import prompts_of_update
        from megatron_rlzero.metrics import read_metrics
        from megatron_rlzero.rollout_files import read_rollouts

        written = [int(line["update"]) for line in read_metrics(self.run_dir) if "reward/mean" in line]
        if written != list(range(updates)):
            self.faults.append(f"metrics are of updates {written}, expected are 0 to {updates - 1}")
        used: Counter = Counter()
        for update in range(updates):
            rollouts = read_rollouts(self.run_dir / "rollouts" / f"update-{update:08d}.safetensors")
            expected = Counter(p.item for p in prompts_of_update(1, SIZE, PROMPTS, update))
            if Counter(r.item for r in rollouts) != expected or {r.update for r in rollouts} != {update}:
                self.faults.append(f"update {update} used {sorted(r.item for r in rollouts)}")
            used += expected
            for r in rollouts:
                versions = r.versions[r.action_mask]
                if not len(versions):
                    continue
                if versions.min() < update - LAG or versions.max() > update or (np.diff(versions) < 0).any():
                    self.faults.append(f"{r.name}: tokens of versions {versions.tolist()}")
        if self.starts != sorted(self.starts):
            self.faults.append(f"the run went on from versions {self.starts}")
        if left := list((self.run_dir / "checkpoints").glob("*.partial")):
            self.faults.append(f"left behind: {left}")
        print(f"{updates} updates, {sum(used.values())} uses of prompts checked", flush=True)


def _text(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _logs_to(process: psutil.Process, log: Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{process.pid}/fd/1", log)
    except OSError:
        return False


def _model(directory: Path) -> Path:
    """A tiny random model with the quick start's tokenizer."""
    sys.path.insert(0, str(CONFIG.parent))
    from prepare import END, make_model, make_tokenizer
    from transformers import PreTrainedTokenizerFast

    size = make_tokenizer(directory)
    end = PreTrainedTokenizerFast.from_pretrained(directory).convert_tokens_to_ids(END)
    make_model(directory, MODEL, size, end, seed=0)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds of training between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        drill = Drill(Path(directory), parsed.seed)
        try:
            return run(drill, parsed)
        finally:
            if drill.process.poll() is None:
                os.killpg(drill.process.pid, signal.SIGKILL)


def run(drill: Drill, parsed: argparse.Namespace) -> int:
    began, order = time.monotonic(), []
    while time.monotonic() - began < 60 * parsed.minutes:
        drill.start(1_000_000)
        print(f"{time.monotonic() - began:5.0f} s: goes on from version {drill.starts[-1]}", flush=True)
        while drill.process.poll() is None and time.monotonic() - began < 60 * parsed.minutes:
            if drill.wait(lambda: drill.lines() > drill.progress_at_start, 300) is None:
                drill.faults.append(f"start {len(drill.starts)} does not train")
                break
            drill.wait(lambda: time.monotonic() - began > 60 * parsed.minutes, parsed.every)
            if drill.process.poll() is None:
                order = order or list(drill.random.sample(KINDS, len(KINDS)))
                drill.kill(order.pop())
        if drill.process.poll() is None:
            os.killpg(drill.process.pid, signal.SIGKILL)
        drill.ended()
        if drill.faults:
            break
    from megatron_rlzero import checkpoint

    updates = checkpoint.resume(drill.run_dir).version + LAST
    if not drill.faults:
        drill.start(updates)
        print(f"{time.monotonic() - began:5.0f} s: from version {drill.starts[-1]} to the end at {updates}", flush=True)
        if (code := drill.process.wait(300)) != 0:
            drill.faults.append(f"the last run ended with exit code {code}")
        drill.ended()
        drill.verify(updates)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": parsed.seed,
        "updates": updates,
        "starts": drill.starts,
        "kills": dict(Counter(kill["kind"] for kill in drill.kills)),
        "faults": drill.faults,
    }
    print(json.dumps(report, indent=2))
    if parsed.report:
        parsed.report.write_text(json.dumps(report, indent=2) + "\n")
    if drill.faults:
        print(Path(drill.output.name).read_text(errors="replace")[-4000:], file=sys.stderr)
    return 1 if drill.faults else 0


if __name__ == "__main__":
    sys.exit(main())
