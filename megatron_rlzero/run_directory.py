"""Checks of run_dir before a start: it can be written to, and holds no run, or the one that is to go on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import OmegaConf
from yaml import YAMLError

from megatron_rlzero import checkpoint, environments
from megatron_rlzero.config import Config, Environment
from megatron_rlzero.config_io import Findings
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.rollout_files import read_rollouts

#: keys that a run keeps when it goes on
FIXED = (
    "seed",
    "model.path",
    "model.dtype",
    "loop.prompts_per_update",
    "loop.samples_per_prompt",
    "rollout.temperature",
    "rollout.max_response_tokens",
    *(f"environment.{field.name}" for field in fields(Environment)),
)


def check_run_dir(f: Findings) -> None:
    """run_dir can be written to and holds no run, or the one that is to go on."""
    if not f.usable("run_dir"):
        return
    path = Path(f.config.run_dir)
    if not f.config.run_dir:
        f.reject("run_dir", "empty", "give a directory")
    elif _holds_lines(path / "metrics.jsonl"):  # a start that failed leaves an empty one
        if f.config.checkpoint.resume:
            _check_same_run(f, path / "config.yaml")
        else:
            f.reject(
                "run_dir", "already holds a run", "remove it, choose another directory, or set checkpoint.resume=true"
            )
    else:
        existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            f.reject("run_dir", f"cannot write in {existing}", "choose a directory that you can write to")


def _check_same_run(f: Findings, saved: Path) -> None:
    """What gives every update its prompts, and the tokens their noise, is as it was when the run began."""
    try:
        before = OmegaConf.load(saved)
    except (OSError, YAMLError) as error:
        f.reject("run_dir", f"a run without a readable config.yaml ({error})", "choose another directory")
        return
    try:
        saved_state = checkpoint.resume(f.config.run_dir)
    except CheckpointError as error:
        f.reject("checkpoint.resume", str(error), "or choose another run_dir")
        saved_state = checkpoint.Saved()
    version = saved_state.version
    _check_same_size(f, saved_state.prompts)
    if f.usable("loop.updates") and f.config.loop.updates < version:
        f.reject("loop.updates", f"the run in run_dir is at version {version} already", "raise it")
    for key in FIXED:
        was = OmegaConf.select(before, key)
        if was != OmegaConf.select(OmegaConf.structured(f.config), key):
            f.reject(key, f"the run in run_dir began with {was}", "set it back, or choose another run_dir")


def _check_same_size(f: Findings, prompts: int) -> None:
    """The order of the prompts follows from their number."""
    if not (prompts and f.usable("environment.path") and f.config.environment.kind == "jsonl"):
        return
    try:
        now = len(environments.build(f.config.environment, "train"))
    except environments.DataError:  # which the check of the data tells
        return
    if now != prompts:
        f.reject(
            "environment.path",
            f"{now} lines, and the run in run_dir has drawn its prompts from {prompts}",
            "put the file back as it was; a line may be another one, but none may come or go",
        )


def _holds_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def check_replay(config: Config, files: Sequence[str], state: str | None) -> list[str]:
    """Violations where recorded batches, or the checkpoint before them, cannot be what they are taken for."""
    violations, updates, size = [], [], config.loop.prompts_per_update * config.loop.samples_per_prompt
    for file in files:
        try:
            rollouts = read_rollouts(file)
        except ValueError as error:
            violations.append(f"--rollouts = {file}: {error}; give files of generate or of loop.record_every")
            continue
        updates.append(rollouts[0].update if rollouts else -1)
        if len(rollouts) != size:
            violations.append(
                f"--rollouts = {file}: {len(rollouts)} responses, and loop.prompts_per_update x "
                f"loop.samples_per_prompt = {size}; set them as they were"
            )
    if updates and updates != list(range(updates[0], updates[0] + len(updates))):
        violations.append(f"--rollouts: of updates {updates}; give successive ones, in their order")
    if state is not None:
        try:
            version = checkpoint.read(Path(state)).version if Path(state).is_dir() else None
        except CheckpointError as error:
            violations.append(f"--checkpoint = {state}: {error}")
        else:
            if version is None:
                violations.append(f"--checkpoint = {state}: no such directory; give run_dir/checkpoints/version-N")
            elif updates and version != updates[0]:
                violations.append(f"--checkpoint = {state}: version {version}; give that of update {updates[0]}")
    return violations
