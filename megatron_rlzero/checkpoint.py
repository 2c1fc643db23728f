"""A run on disk, from which it goes on as if it had never stopped: run_dir/checkpoints/version-N, whole or absent.

What a run is made of: the learner's training state; the version, from which the order of prompts and the sampler's
noise follow; finished responses that no update has used yet; how far the metrics had been written. Responses that were
under way are sampled again, with the same noise.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rlzero.resharding.directories import CheckpointError, staged
from megatron_rlzero.rollout import Rollout
from megatron_rlzero.rollout_files import read_rollouts, write_rollouts

DIRECTORY, LEARNER = "checkpoints", "learner"
#: written last; a directory without it is not whole
STATE, ROLLOUTS = "state.json", "rollouts.safetensors"


@dataclass
class Saved:
    """Where a run goes on.

    Attributes:
        version: of the weights, and the update that comes next.
        best: highest held-out accuracy so far; -1 before the first evaluation.
        sizes: file of the run directory -> bytes that belong to this state.
        prompts: training prompts that there are; 0 before the first checkpoint.
        learner: directory of the training state; None where the run begins with ``model.path``.
        finished: responses of later updates.
    """

    version: int = 0
    best: float = -1.0
    sizes: Mapping[str, int] = field(default_factory=dict)
    prompts: int = 0
    learner: Path | None = None
    finished: Sequence[Rollout] = ()


def save(run_dir: str | Path, state: Saved, write_learner: Callable[[str], None], keep: int) -> Path:
    """Writes a checkpoint, then removes all but the last ``keep``, and what an earlier removal left.

    Args:
        write_learner: writes the training state into the directory it is given; collective.

    Raises:
        CheckpointError: another process is writing the same checkpoint.
        OSError: the disk is full, for one; nothing is left of it then.
    """
    target = Path(run_dir) / DIRECTORY / f"version-{state.version:08d}"
    with staged(target, replace=True) as partial:
        (partial / LEARNER).mkdir()
        write_learner(str(partial / LEARNER))
        write_rollouts(partial / ROLLOUTS, state.finished)
        files = sorted(path.name for path in (partial / LEARNER).iterdir())
        values = {
            "version": state.version,
            "best": state.best,
            "sizes": dict(state.sizes),
            "prompts": state.prompts,
            "files": files,
        }
        (partial / STATE).write_text(json.dumps(values, indent=2) + "\n")
    for old in whole(run_dir)[:-keep]:
        (old / STATE).unlink()  # first: what is removed in part is not taken for whole
    for old in _versions(run_dir):
        if not (old / STATE).is_file():
            shutil.rmtree(old)
    return target


def _versions(run_dir: str | Path) -> list[Path]:
    found = Path(run_dir, DIRECTORY).glob("version-*")
    return sorted(path for path in found if re.fullmatch(r"version-\d+", path.name))


def whole(run_dir: str | Path) -> list[Path]:
    """The run's checkpoints that are whole, oldest first."""
    return [path for path in _versions(run_dir) if (path / STATE).is_file()]


def read(directory: Path) -> Saved:
    """What ``save`` wrote.

    Raises:
        CheckpointError: a file of it is missing or damaged; names it.
    """
    from megatron_rlzero.resharding.safetensors_files import SafetensorsReader  # and torch with it

    try:
        state = json.loads((directory / STATE).read_text())
        finished = read_rollouts(directory / ROLLOUTS)
        if absent := {*state.pop("files")} - {path.name for path in (directory / LEARNER).iterdir()}:
            raise CheckpointError(f"{LEARNER} lacks {sorted(absent)}")
        SafetensorsReader(directory / LEARNER)  # finds files that were cut off
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory} is damaged: {error}; remove it to resume from the one before") from None
    now = time.monotonic()
    for rollout in finished:  # the clock of another boot, or machine
        rollout.info |= {"start": now - (rollout.info["end"] - rollout.info["start"]), "end": now}
    return Saved(**state, learner=directory / LEARNER, finished=finished)


def resume(run_dir: str | Path) -> Saved:
    """The last checkpoint of a run; its beginning where there is none."""
    found = whole(run_dir)
    return read(found[-1]) if found else Saved()
