"""A job for one side, run in processes of its own: a plan of tasks goes in as JSON, tensors come back as files.

A task is a dictionary with ``kind``, a ``name`` that its files carry, and ``settings``, keys of the configuration with
the values that they have for it.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_rlzero.config import Config

Task = dict[str, Any]


class AlignError(RuntimeError):
    """A side could not run at all; says which, and the end of what it printed."""


@dataclass(frozen=True)
class Job:
    """What a side reads: the configuration, and where its files go."""

    config: Config
    out: Path
    tasks: list[Task]

    @staticmethod
    def read(path: str | Path) -> Job:
        plan = json.loads(Path(path).read_text())
        out = Path(plan["out"])
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(out / "config.yaml"))
        return Job(OmegaConf.to_object(merged), out, plan["tasks"])

    def configured(self, task: Task) -> Config:
        """The configuration with the task's settings."""
        return with_settings(self.config, task.get("settings", {}))


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy in which ``section.key`` have other values."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        node: Any = changed
        for section in sections:
            node = getattr(node, section)
        setattr(node, name, value)
    return changed


def run_engine(config: Config, out: Path, tasks: Sequence[Task]) -> None:
    """vLLM in a process of its own, with the environment of a run's servers.

    Raises:
        AlignError: it failed.
    """
    from megatron_rlzero.generation import server

    variables = server.environment(config) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    _run("engine", [sys.executable, "-m", "megatron_rlzero.align.engine"], variables, config, out, tasks)


def run_learner(
    config: Config, out: Path, tasks: Sequence[Task], module: str = "megatron_rlzero.align.learner"
) -> None:
    """The learner on ``learner.world_size`` ranks, which run ``module``.

    Raises:
        AlignError: it failed.
    """
    from megatron_rlzero.generation import server

    world = config.learner.world_size
    ranks = "import sys; from megatron_rlzero.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"
    command = [sys.executable, "-c", ranks, str(world), "-m", module]
    _run("learner", command, server.base_environment(), config, out, tasks)


def _run(
    side: str, command: list[str], variables: dict[str, str], config: Config, out: Path, tasks: Sequence[Task]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), out / "config.yaml")
    plan, log = out / f"{side}.json", out / f"{side}.log"
    plan.write_text(json.dumps({"out": str(out), "tasks": list(tasks)}))
    with log.open("wb") as output:
        variables = variables | {"PYTHONWARNINGS": "ignore"}
        done = subprocess.run([*command, str(plan)], env=variables, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        text = log.read_text(errors="replace")
        raise AlignError(f"the {side} failed with exit code {done.returncode}; {log} ends with\n{text[-2500:]}")
