"""The run directory: metrics.jsonl, completions.jsonl, TensorBoard events, config.yaml, and the progress line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.config import Config
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.rollout import RETRIES_FILE, Rollout

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
LINES = (METRICS_FILE, COMPLETIONS_FILE, RETRIES_FILE)
ABANDONED_FILE = "abandoned.jsonl"
CONFIG_FILE = "config.yaml"
TENSORBOARD_DIR = "tensorboard"
#: greedy responses kept of an evaluation
COMPLETIONS = 3
#: updates between two lines where the output is not a terminal
PLAIN_EVERY = 10

#: what the progress line shows: label, metric, format. Times are seconds of this update.
PROGRESS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("lag", "lag/mean", "{:.2f}"),
    ("KL", "rollout_kl/k3", "{:.1e}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("generation", "seconds/generation", "{:.2f}s"),
    ("learning", "seconds/learning", "{:.2f}s"),
    ("waiting", "seconds/waiting_for_rollouts", "{:.2f}s"),
    ("refit", "seconds/refit", "{:.2f}s"),
)
HELD_OUT = (("sampled", "eval/sampled", "{:.3f}"), ("greedy", "eval/greedy", "{:.3f}"))


def progress_text(metrics: Mapping[str, float], fields: tuple[tuple[str, str, str], ...] = PROGRESS) -> str:
    """The labelled values of those of ``fields`` that the update has: a refit, for one, is not in every update."""
    return "  ".join(f"{label} {form.format(metrics[name])}" for label, name, form in fields if name in metrics)


class RunLog:
    """Writes one run's metrics as they come; a context manager, closed by leaving it.

    A line of metrics.jsonl is {"update": u, name: value, ...}: the metrics of update u, or, named eval/..., those of a
    held-out evaluation of weight version u. A line of completions.jsonl is {"version": v, "greedy": [{"item", "prompt",
    "response", "reward"}, ...]}, prompt and response as token ids. A line is on disk, whole, when its method returns.
    """

    def __init__(self, config: Config, console: Console | None = None, saved: Saved | None = None) -> None:
        """Makes config.run_dir and saves config.yaml in it.

        Args:
            saved: where a run goes on. Lines that were written after it are moved to abandoned.jsonl: their updates are
                done again.

        Raises:
            FileExistsError: the directory holds a run, and ``saved`` is None.
        """
        from torch.utils.tensorboard import SummaryWriter  # imported here: commands that only read a run do without

        self.run_dir = Path(config.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        if saved is None and path.exists() and path.stat().st_size:
            raise FileExistsError(f"run_dir = {self.run_dir}: already holds a run; choose another directory")
        moved = sum(_cut(self.run_dir / name, saved.sizes.get(name, 0) if saved else 0) for name in LINES)
        OmegaConf.save(OmegaConf.structured(config), self.run_dir / CONFIG_FILE)
        self._file = path.open("a", encoding="utf-8")
        # Viewers forget the points of an earlier start from that step on.
        version = saved.version if saved else None
        self._tensorboard = SummaryWriter(str(self.run_dir / TENSORBOARD_DIR), purge_step=version)
        for line in read_metrics(self.run_dir):
            if line["update"] == version:  # an evaluation at the checkpoint
                self._show(line.pop("update"), line)
        self._console = console or Console(soft_wrap=True)
        self._updates = config.loop.updates
        if saved is not None:
            self.note(
                f"{self.run_dir} goes on from version {saved.version}; {moved} later lines are in {ABANDONED_FILE}"
            )
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("update"),
                MofNCompleteColumn(),
                BarColumn(bar_width=16),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=self._updates)
            self._progress.start()

    def update(self, update: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of an update and shows progress.

        Raises:
            ValueError: a value that is not finite, by name; nothing is written then.
        """
        self._write(update, metrics)
        text = progress_text(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=update + 1, description=text)
        elif update % PLAIN_EVERY == 0 or update == self._updates - 1:
            self._console.print(f"update {update}/{self._updates}  {text}", highlight=False)

    def evaluation(self, version: int, metrics: Mapping[str, float], greedy: Sequence[Rollout]) -> None:
        """Records a held-out evaluation of a weight version and its first greedy responses.

        Names are put under eval/ where they are not, apart from the same metrics of the training batch.

        Raises:
            ValueError: as ``update``.
        """
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._write(version, named)
        kept = [_completion(rollout) for rollout in greedy[:COMPLETIONS]]
        with (self.run_dir / COMPLETIONS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"version": version, "greedy": kept}) + "\n")
        text = progress_text(named, HELD_OUT)
        self._console.print(f"held-out accuracy at version {version}: {text}", highlight=False)

    def sizes(self) -> dict[str, int]:
        """Bytes of the files of lines, which a checkpoint keeps; they are on disk, whatever becomes of the machine."""
        return {name: _on_disk(self.run_dir / name) for name in LINES}

    def note(self, text: str) -> None:
        """A line on the console."""
        self._console.print(text, highlight=False)

    def _write(self, update: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"update {update}: metric {name} is {value}; metrics have to be finite")
        self._file.write(json.dumps({"update": update, **values}, allow_nan=False) + "\n")
        self._file.flush()
        self._show(update, values)

    def _show(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, update)

    def close(self) -> None:
        """Ends the progress line and closes the files; calling it again does nothing."""
        if self._progress is not None:
            self._progress.stop()
        self._tensorboard.close()
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _on_disk(path: Path) -> int:
    """Size of a file, none being 0, once the disk has it."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _cut(path: Path, size: int) -> int:
    """Leaves the first ``size`` bytes; the rest, of so many lines, goes to the end of abandoned.jsonl."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    if len(data) < size:
        raise CheckpointError(
            f"{path} has {len(data)} bytes and the checkpoint counts on {size}: put the file back, or remove the "
            "newest of checkpoints/"
        )
    if len(data) > size:
        with path.with_name(ABANDONED_FILE).open("ab") as file:
            file.write(data[size:])
        os.truncate(path, size)
    return data[size:].count(b"\n")


def _completion(rollout: Rollout) -> dict[str, object]:
    first = int(rollout.action_mask.argmax()) if rollout.action_tokens else len(rollout.tokens)
    tokens = rollout.tokens.tolist()
    return {
        "item": rollout.item,
        "prompt": tokens[:first],
        "response": tokens[first:],
        "reward": float(rollout.reward),
    }


def read_metrics(run_dir: str | Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl in their order.

    Raises:
        FileNotFoundError: run_dir holds no run.
        ValueError: a line that is not whole, by number.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; give the run_dir of a run")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number}: {error.msg}; remove the line") from error
    return lines
