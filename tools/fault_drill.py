"""Trains while processes are killed at random, resumes, and proves that nothing was lost, used twice or left behind.

Usage: python tools/fault_drill.py [--minutes 30] [--every 60] [--seed 0] [--report FILE.json]. A tiny model, two
learner ranks, two servers, at most four versions of lag. Every so many seconds of training one of KINDS is killed with
SIGKILL, each kind once before any comes again. A run that ends is started again, from its last whole checkpoint; the
last one is left to end by itself. Exit code 0 if all of ``verify`` holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from tiny_run import PROMPTS, SIZE, TinyRun, text

KINDS = ("server", "whole run", "during refit", "during checkpoint", "worker", "learner rank", "client")
LAG, LAST = 4, 6
#: seconds after a kill in which all is gone, in which a kind of kill finds its moment, and from a start to its training
GONE_S, MOMENT_S, START_S = 40.0, 60.0, 900.0
OVERRIDES = (
    "learner.world_size=2",
    f"loop.max_lag={LAG}",
    "loop.record_every=1",
    "rollout.servers=2",
    "rollout.max_restarts=1000000",
    "refit.deadline_s=20",
    "checkpoint.every=3",
    "checkpoint.resume=true",
)


class Drill(TinyRun):
    """A run, what was done to it, and what was wrong afterwards."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, *OVERRIDES)
        self.random = random.Random(seed)
        self.faults: list[str] = []
        self.kills: list[str] = []
        self.starts: list[int] = []

    def go_on(self, updates: int) -> None:
        """Starts the run where its last whole checkpoint is, and reads all of that first."""
        from megatron_rlzero import checkpoint
        from megatron_rlzero.resharding.safetensors_files import SafetensorsReader

        for path in checkpoint.whole(self.run_dir):
            try:
                SafetensorsReader(checkpoint.read(path).learner)
            except ValueError as error:
                self.faults.append(f"{path.name} counts as whole: {error}")
        self.starts.append(checkpoint.resume(self.run_dir).version)
        self.lines_at_start = self.lines()
        self.start(updates)

    def lines(self) -> int:
        """Bytes of metrics: more than at the start once the run trains."""
        path = self.run_dir / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

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
        self.kills.append(kind)
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
                self.faults.append(f"left behind: {[(p.pid, text(p)[:80]) for p in left]}")
                break
            time.sleep(0.2)

    def _any(self, found: list[psutil.Process]) -> psutil.Process | None:
        return self.random.choice(found) if found else None

    def _paused(self) -> psutil.Process | None:
        """A server that has stopped for the swap of its weights at this moment; its log says so."""
        for log in self.run_dir.glob("server-*.log"):
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - 2000, 0))
                end = file.read()
            if end.rfind(b"pause state to PAUSED") > end.rfind(b"pause state to UNPAUSED"):
                for process in self.find("vllm.entrypoints"):
                    if _logs_to(process, log):
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
            try:
                rollouts = read_rollouts(self.run_dir / "rollouts" / f"update-{update:08d}.safetensors")
            except ValueError as error:
                self.faults.append(str(error))
                continue
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


def _logs_to(process: psutil.Process, log: Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{process.pid}/fd/1", log)
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="from the first update on")
    parser.add_argument("--every", type=float, default=60.0, help="seconds of training between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        drill = Drill(Path(directory), parsed.seed)
        try:
            return run(drill, parsed)
        finally:
            if drill.running():
                os.killpg(drill.process.pid, signal.SIGKILL)


def run(drill: Drill, parsed: argparse.Namespace) -> int:
    began, end, order = time.monotonic(), math.inf, []
    while time.monotonic() < end:
        drill.go_on(1_000_000)
        print(f"{time.monotonic() - began:5.0f} s: goes on from version {drill.starts[-1]}", flush=True)
        while drill.running() and time.monotonic() < end:
            if drill.wait(lambda: drill.lines() > drill.lines_at_start, START_S) is None:
                drill.faults.append(f"start {len(drill.starts)} does not train")
                break
            end = min(end, time.monotonic() + 60 * parsed.minutes)
            drill.wait(lambda: False, min(parsed.every, end - time.monotonic()))
            if drill.running():
                order = order or list(drill.random.sample(KINDS, len(KINDS)))
                drill.kill(order.pop())
        if drill.running():
            os.killpg(drill.process.pid, signal.SIGKILL)
        drill.ended()
        if drill.faults:
            break
    from megatron_rlzero import checkpoint

    updates = checkpoint.resume(drill.run_dir).version + LAST
    if not drill.faults:
        drill.go_on(updates)
        print(f"{time.monotonic() - began:5.0f} s: from version {drill.starts[-1]} to the end at {updates}", flush=True)
        if (code := drill.process.wait(START_S)) != 0:
            drill.faults.append(f"the last run ended with exit code {code}")
        drill.ended()
        drill.verify(updates)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seed": parsed.seed,
        "updates": updates,
        "starts": drill.starts,
        "kills": dict(Counter(drill.kills)),
        "joined": drill.output.read_text(errors="replace").count(") joins\n"),
        "faults": drill.faults,
    }
    print(json.dumps(report, indent=2))
    if parsed.report:
        parsed.report.write_text(json.dumps(report, indent=2) + "\n")
    if drill.faults:
        print(drill.output.read_text(errors="replace")[-4000:], file=sys.stderr)
    return 1 if drill.faults else 0


if __name__ == "__main__":
    sys.exit(main())
