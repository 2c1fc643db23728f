"""The arms of the throughput command: what each of them runs, and its result in a JSON file from which it goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_rlzero.config import Config
from megatron_rlzero.generation.schedule import responses_of_update
from megatron_rlzero.metrics import TENSORBOARD_DIR, read_metrics
from megatron_rlzero.rollout import RETRIES_FILE
from tools.evidence import throughput_run
from tools.evidence.drawn_client import draw
from tools.evidence.results import write_whole
from tools.tiny_run import CONFIG, ROOT

SEED, LAG, SIZE = 1, 8, 2048
#: about 150 tokens before each problem, one a letter: the learner computes them every time, the server from its cache
PROMPT = (
    "Read the line below with care and answer with nothing but the one word that it asks for letter by letter from "
    "the last one to the first and then stop {problem}"
)
#: updates of an asynchronous run, and those of every run that are measured. Before them the queue fills, after them
#: there is no further prompt to start, and the queue empties; a synchronous run ends with them.
UPDATES = 26
MEASURED = range(LAG + 2, UPDATES - LAG - 1)
#: of a pilot, which is synchronous
PILOT_UPDATES, PILOT = 6, range(1, 6)
#: lag, and whether learner and server have a core each (or both cores, one after the other)
ARMS = {"asynchronous": (LAG, True), "synchronous": (0, True), "colocated": (0, False)}
#: what is kept of an update; period is from the end of the update before to its own
KEPT = ("generation", "waiting_for_rollouts", "learning", "refit")


@dataclass(frozen=True)
class Sizes:
    """B, S, the lengths, and learner.recompute: chosen so that learner and generation take about equally long."""

    batch: int
    slots: int
    mean: int
    longest: int
    recompute: str = "none"


def cores() -> tuple[int, int]:
    """The learner's and the server's.

    Raises:
        RuntimeError: there is only one.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise RuntimeError(f"this process may use core {found} alone; learner and server need one each")
    return found[0], found[1]


def overrides(sizes: Sizes, model: Path, lag: int, pinned: bool, updates: int) -> list[str]:
    """Of the quick start's configuration. Weights move by weight decay: a random model earns no reward."""
    threads = 1 if pinned else 2
    return [
        f"seed={SEED}",
        f"model.path={model}",
        "learner.world_size=1",
        f"learner.threads_per_rank={threads}",
        f"learner.recompute={sizes.recompute}",
        "learner.optimizer.weight_decay=0.1",
        "learner.max_tokens_per_microbatch=8192",
        f"rollout.threads_per_server={threads}",
        f"rollout.max_num_seqs={sizes.slots}",
        f"rollout.max_response_tokens={sizes.longest}",
        f"environment.size={SIZE}",
        f"environment.prompt_template={PROMPT}",
        "rollout.max_prompt_tokens=192",
        f"loop.prompts_per_update={sizes.batch}",
        f"loop.max_lag={lag}",
        f"loop.updates={updates}",
        "eval.every=0",
        "eval.prompts=4",
        "probe.every=0",
    ]


def timing(out: Path, name: str, kind: str, sizes: Sizes, lag: int, pinned: bool, updates: int, env: dict) -> dict:
    """The rows of a timing run, one per update; run at most once."""
    changed = overrides(sizes, out / "model", lag, pinned, updates)
    learner, server = cores() if pinned else (None, "any")
    head = ["tools.evidence.throughput_run", str(CONFIG), kind, str(sizes.mean), str(server)]

    def rows(run_dir: Path) -> list[dict]:
        if (run_dir / RETRIES_FILE).exists():
            raise RuntimeError(f"{name}: responses failed and were asked for again; see {run_dir}/retries.jsonl")
        found = read(run_dir)
        for row in found:
            wanted = sum(lengths(sizes, kind, row["update"]))
            if row["action_tokens"] != wanted:
                raise RuntimeError(f"{name}: update {row['update']} has {row['action_tokens']} tokens, drawn: {wanted}")
        return found

    settings = {"kind": kind, "mean": sizes.mean, "cores": [learner, server], "overrides": changed}
    return stored(out, name, settings, head, env, learner, rows)


def stored(out: Path, name: str, settings: dict, head: list[str], env: dict, core: int | None, rows) -> dict:
    """The content of OUT/NAME.json; if it is not there, runs ``python -m HEAD overrides`` on ``core`` and writes it.

    Raises:
        ValueError: the file is of other settings.
        RuntimeError: the run failed.
    """
    file, run_dir = out / f"{name}.json", out / "runs" / name
    if (found := kept(file, settings)) is not None:
        return found
    shutil.rmtree(run_dir, ignore_errors=True)  # of a run that was killed
    run_dir.mkdir(parents=True)
    load = os.getloadavg()[0]
    print(f"{name} ... (load {load:.1f})", flush=True)
    with (run_dir / "output.log").open("wb") as log, throughput_run.on(core):
        watched = [sys.executable, "-m", "megatron_rlzero.watch", str(os.getpid())]  # it ends with this process
        command = [*watched, *head, *settings["overrides"], f"run_dir={run_dir}"]
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}; see {run_dir}/output.log")
    found = {"settings": settings, "load_before": load, "rows": rows(run_dir)}
    return saved(file, found)


def saved(file: Path, found: dict) -> dict:
    write_whole(file, json.dumps(found, indent=1) + "\n")
    return found


def kept(file: Path, settings: dict) -> dict | None:
    """What an earlier start has saved; None if it has not. ValueError where it is of other settings."""
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    if found["settings"] != json.loads(json.dumps(settings)):
        raise ValueError(f"{file} is of other settings; remove it or choose another --out")
    return found


def read(run_dir: Path) -> list[dict]:
    """One row per update but the first. What follows an update (log, comparison of log-probs) is no part of
    seconds/update; the times at which TensorBoard got two updates have all of it between them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / TENSORBOARD_DIR), size_guidance={"scalars": 0}).Reload()
    at = {event.step: event.wall_time for event in events.Scalars("seconds/update")}
    lines = [line for line in read_metrics(run_dir) if "seconds/update" in line]
    return [
        {"update": int(line["update"]), "period": at[line["update"]] - at[before["update"]]}
        | {name: line[f"seconds/{name}"] for name in KEPT}
        | {"action_tokens": line["response/action_tokens"], "recomputed": line["refit/recomputed_tokens"]}
        | {"lag_mean": line["lag/mean"], "lag_max": line["lag/max"]}
        for before, line in pairwise(lines)
    ]


def lengths(sizes: Sizes, kind: str, update: int) -> list[int]:
    """The drawn lengths of an update, in the order in which its responses are asked for."""
    config = Config(seed=SEED)
    config.loop.prompts_per_update = sizes.batch
    return [
        draw(kind, sizes.mean, sizes.longest, (SEED, prompt.epoch, prompt.item, sample))
        for prompt, sample in responses_of_update(config, SIZE, update)
    ]


def mean(run: dict, name: str, updates: Sequence[int] = MEASURED) -> float:
    """Over the measured updates, seconds."""
    return float(np.mean([row[name] for row in run["rows"] if row["update"] in updates]))
