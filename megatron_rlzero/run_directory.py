"""Checks of run_dir before a start: it can be written to, and holds no run, or the one that is to go on."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from omegaconf import OmegaConf
from yaml import YAMLError

from megatron_rlzero.config import Environment
from megatron_rlzero.config_io import Findings

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
    for key in FIXED:
        was = OmegaConf.select(before, key)
        if was != OmegaConf.select(OmegaConf.structured(f.config), key):
            f.reject(key, f"the run in run_dir began with {was}", "set it back, or choose another run_dir")


def _holds_lines(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
