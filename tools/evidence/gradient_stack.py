"""The whole stack at frozen weights: snapshots of a run, responses from a server, gradients of them from a learner.

Everything is kept in one directory, a file per piece of work, and what is there is not done again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rlzero import advantage
from megatron_rlzero.config import Config
from megatron_rlzero.rollout import Rollout
from megatron_rlzero.rollout_files import read_rollouts, write_rollouts
from megatron_rlzero.validation import load
from tools.evidence.results import ROOT

QUICK_START = ROOT / "examples" / "quickstart" / "qwen3_moe.yaml"
#: of the quick start's model
LAYERS = 2
#: of the run that makes the snapshots; the learner's gradients are at VERSION
VERSION, LAGS, MAX_LAG = 60, (0, 2, 8), 8
#: a group of batches is one piece of sampling: each of PROMPTS prompts SAMPLES times, in batches of BATCH prompts
PROMPTS, SAMPLES, BATCH = 1600, 2, 32
BATCHES = PROMPTS * SAMPLES // BATCH
#: sums over a group's action tokens or responses; seconds of the group
COUNTS = (
    "tokens", "k3", "w", "w2", "differing", "difference", "responses", "other", "reward", "length",
    "sampling_s", "learning_s",
)  # fmt: skip
#: largest over a group's action tokens
LARGEST = ("ratio_max", "difference_max")


@dataclass(frozen=True)
class Arm:
    """Who samples; ``seed`` is that of the noise."""

    kernels: str
    lag: int
    seed: int
    name: str


class Stack:
    """``directory`` holds base, weights/V, rollouts/ARM-PIECE and gradients/ARM-PIECE."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    def config(self, *overrides: str, starting: bool = False) -> Config:
        """The quick start's, with one learner rank, in bf16."""
        return load(QUICK_START, [*self._overrides(), *overrides], starting=starting)

    def _overrides(self) -> list[str]:
        paths = [f"model.path={self.directory / 'base'}", f"run_dir={self.directory / 'run'}"]
        return [*paths, "model.dtype=bf16", "learner.world_size=1"]

    def weights(self, lag: int) -> Path:
        return self.directory / "weights" / f"version-{VERSION - lag}"

    def rollouts(self, arm: Arm, piece: int) -> Path:
        return self.directory / "rollouts" / f"{arm.name}-{piece:02d}.safetensors"

    def gradients(self, arm: Arm, piece: int) -> Path:
        return self.directory / "gradients" / f"{arm.name}-{piece:02d}.safetensors"

    def make_snapshots(self) -> None:
        """The quick start's warm-up, then its training as far as each version, and there the exported policy."""
        for name in ("weights", "rollouts", "gradients"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        model = self.directory / "model.json"
        hf = json.loads(QUICK_START.with_suffix(".json").read_text())
        model.write_text(json.dumps(hf | {"num_hidden_layers": LAYERS}) + "\n")
        if not (self.directory / "base" / "model.safetensors").exists():
            _run([str(QUICK_START.parent / "prepare.py"), str(QUICK_START), str(model), *self._overrides()])
        train = ["-m", "megatron_rlzero", "train", str(QUICK_START), *self._overrides(), f"loop.max_lag={MAX_LAG}"]
        train += ["eval.every=0", "checkpoint.every=1000", "checkpoint.resume=true"]  # one at the end of every start
        for lag in sorted(LAGS, reverse=True):
            target = self.weights(lag)
            if not target.exists():
                _run([*train, f"loop.updates={VERSION - lag}"])
                partial = target.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(self.directory / "run" / "policy", partial)
                partial.rename(target)

    def sample(self, arm: Arm, pieces: int) -> None:
        """The arm's missing pieces, from one server.

        Piece p is what a run of this seed would take as update p: all PROMPTS training prompts, SAMPLES times, with
        noise keys (seed, p, item, sample). One piece at a time: max_lag is 0 here, and the server keeps its weights.
        """
        from megatron_rlzero.generation.engine import RolloutEngine

        left = [piece for piece in range(pieces) if not self.rollouts(arm, piece).exists()]
        if not left:
            return
        config = self.config(
            f"run_dir={self.directory / 'servers' / arm.name}",
            f"model.path={self.weights(arm.lag)}",
            f"kernels={arm.kernels}",
            f"seed={arm.seed}",
            f"environment.size={PROMPTS}",
            f"loop.prompts_per_update={PROMPTS}",
            f"loop.samples_per_prompt={SAMPLES}",
            f"loop.updates={pieces}",
            "loop.max_lag=0",
            "rollout.max_restarts=0",
        )
        engine = RolloutEngine(config)
        try:
            engine.wait_ready()
            for piece in range(left[0], pieces):
                begin = time.monotonic()
                engine.label_weights(piece)
                engine.set_version(piece)
                rollouts = engine.take(piece)
                if failed := sum(r.finish_reason == "failed" for r in rollouts):
                    raise RuntimeError(f"{arm.name}, piece {piece}: {failed} responses failed; see {config.run_dir}")
                write_rollouts(self.rollouts(arm, piece), rollouts)
                print(f"{arm.name} piece {piece}: sampled in {time.monotonic() - begin:.0f} s", flush=True)
        finally:
            engine.close()


def batches(rollouts: list[Rollout], seed: int, piece: int) -> Iterator[list[Rollout]]:
    """BATCHES lists of BATCH responses to different prompts, in an order that seed and piece fix."""
    by_key = {(r.item, r.sample): r for r in rollouts}
    if len(by_key) != PROMPTS * SAMPLES:
        raise ValueError(f"{len(by_key)} different responses, not {PROMPTS * SAMPLES}")
    for sample in range(SAMPLES):
        order = np.random.Generator(np.random.Philox(key=[seed, piece * SAMPLES + sample])).permutation(PROMPTS)
        for first in range(0, PROMPTS, BATCH):
            yield [by_key[int(item), sample] for item in order[first : first + BATCH]]


class Gradients:
    """One learner, of one rank in this process, with the weights of VERSION; they never change."""

    def __init__(self, stack: Stack) -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        from megatron_rlzero.learner.build import initialise_distributed  # sets what torch's products need
        from megatron_rlzero.learner.learner import Learner

        self.stack = stack
        config = stack.config(f"model.path={stack.weights(0)}", f"run_dir={stack.directory / 'learner'}")
        device, _ = initialise_distributed(config)
        self.learner = Learner(config, device)

    def batch(self, rollouts: list[Rollout]) -> tuple[Tensor, NDArray[np.float32]]:
        """The batch's gradient, all parameters end to end in float64, and log pi of its tokens."""
        from megatron_rlzero.learner.batch import Batch

        rewards, items = np.array([r.reward for r in rollouts]), np.array([r.item for r in rollouts])
        done = self.learner.backward(Batch.of(rollouts, advantage.compute("batch_mean", rewards, items)))
        found = self.learner.weights.gradients()
        return torch.cat([found[name].double().flatten() for name in sorted(found)]), done.log_pi.numpy()

    def piece(self, arm: Arm, aligned: Arm, piece: int) -> None:
        """Writes a group's sum of gradients, squared norms [BATCHES], COUNTS and LARGEST, unless they are there.

        ``aligned`` is the arm whose responses this one's are compared with.
        """
        path, begin = self.stack.gradients(arm, piece), time.monotonic()
        if path.exists():
            return
        total, squares = torch.zeros(()), []
        counts, largest = dict.fromkeys(COUNTS, 0.0), dict.fromkeys(LARGEST, 0.0)
        rollouts = read_rollouts(self.stack.rollouts(arm, piece))
        twins = {(r.item, r.sample): r for r in read_rollouts(self.stack.rollouts(aligned, piece))}
        for batch in batches(rollouts, arm.seed, piece):
            gradient, log_pi = self.batch(batch)
            total = total + gradient
            squares.append(gradient @ gradient)
            _count(batch, [twins[r.item, r.sample] for r in batch], log_pi, counts, largest)
        if arm.kernels == "aligned" and arm.lag == 0 and counts["differing"]:
            raise RuntimeError(f"{path.stem}: {counts['differing']:.0f} tokens differ at equal weights and kernels")
        counts["sampling_s"] = max(r.info["end"] for r in rollouts) - min(r.info["start"] for r in rollouts)
        counts["learning_s"] = time.monotonic() - begin
        partial = path.with_suffix(".partial")
        values = torch.tensor([*counts.values(), *largest.values()], dtype=torch.float64)
        save_file({"sum": total, "squares": torch.stack(squares), "counts": values}, partial)
        partial.replace(path)
        print(f"{arm.name} piece {piece}: gradients in {counts['learning_s']:.0f} s", flush=True)


def read_gradients(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, float]]:
    """Sum [parameters], squared norms [BATCHES] and the counts of a group."""
    found = load_file(path)
    return (
        found["sum"].numpy(),
        found["squares"].numpy(),
        dict(zip((*COUNTS, *LARGEST), found["counts"].tolist(), strict=True)),
    )


def _count(
    batch: list[Rollout],
    twins: list[Rollout],
    log_pi: NDArray[np.float32],
    counts: dict[str, float],
    largest: dict[str, float],
) -> None:
    """Adds a batch: formulas of diagnostics.py as sums."""
    action = np.concatenate([r.action_mask for r in batch])
    mu, pi = np.concatenate([r.logprobs for r in batch])[action], log_pi[action]
    d = pi.astype(np.float64) - mu.astype(np.float64)
    w = np.exp(d)
    added = {
        "tokens": len(d),
        "k3": (np.expm1(d) - d).sum(),
        "w": w.sum(),
        "w2": (w * w).sum(),
        "differing": (pi.view(np.int32) != mu.view(np.int32)).sum(),
        "difference": np.abs(d).sum(),
        "responses": len(batch),
        "other": sum(not np.array_equal(r.tokens, t.tokens) for r, t in zip(batch, twins, strict=True)),
        "reward": sum(r.reward for r in batch),
        "length": sum(r.action_tokens for r in batch),
    }
    for name, value in added.items():
        counts[name] += float(value)
    largest["ratio_max"] = max(largest["ratio_max"], float(w.max()))
    largest["difference_max"] = max(largest["difference_max"], float(np.abs(d).max()))


def _run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
