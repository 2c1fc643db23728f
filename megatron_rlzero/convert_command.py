"""The command line of ``convert``: progress, sizes, speed, and the comparison with transformers."""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from megatron_rlzero.architectures import add
from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.architectures.layouts import Parallel
from megatron_rlzero.convert import to_hf, to_megatron
from megatron_rlzero.launch import is_rank, ranks_store
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.team import Team

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
#: seconds between two lines of progress where no terminal is
INTERVAL = 10.0


def run(parsed: Namespace) -> int:
    """Converts, alone or as one of torchrun's processes, and prints size and speed; 1 if --verify fails."""
    start = time.perf_counter()
    _check_options(parsed)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what is half written goes
    team = _team()
    with _Report(parsed.target) as report:
        progress = report if team.rank == 0 else lambda total, done: None
        if parsed.to == "megatron":
            size = to_megatron(parsed.source, parsed.target, _parallel(parsed), parsed.naming, progress, team)
        else:
            size = to_hf(parsed.source, parsed.target, parsed.config, progress, team=team)
    if team.rank:
        return 0
    seconds = time.perf_counter() - start
    print(f"{parsed.target}: {size:,} bytes in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")
    return _verify(parsed) if parsed.verify else 0


def _check_options(parsed: Namespace) -> None:
    """Raises CheckpointError for wrong options, and for a target inside the source."""
    faults = []
    if parsed.family:
        try:
            add(parsed.family)
        except ValueError as error:
            faults.append(f"--family = {error}")
    if parsed.to == "hf":
        given = [name for name in SIZES if getattr(parsed, name) != 1]
        given += ["naming"] if parsed.naming != "hybrid" else []
        faults += [
            f"--{name.replace('_', '-')} = {getattr(parsed, name)}: of --to megatron alone; remove it" for name in given
        ]
    elif parsed.config is not None:
        faults.append(f"--config = {parsed.config}: of --to hf alone; remove it")
    if Path(parsed.source).resolve() in Path(parsed.target).resolve().parents:
        faults.append(f"{parsed.target} lies inside {parsed.source}; choose a target beside it")
    if faults:
        raise CheckpointError(*faults)


def _team() -> Team:
    """The processes that torchrun or ``launch`` has started; this one alone without them."""
    return Team(*ranks_store()) if is_rank() else Team()


def _parallel(parsed: Namespace) -> Parallel:
    sizes = {name: getattr(parsed, name) for name in SIZES}
    if wrong := [f"{name} = {value}: must be 1 or more" for name, value in sizes.items() if value < 1]:
        raise CheckpointError(*wrong)
    return smallest_world(*sizes.values())


def _verify(parsed: Namespace) -> int:
    from megatron_rlzero.learner.verify import TOLERANCE, largest_difference

    megatron, directory = (parsed.target, parsed.source) if parsed.to == "megatron" else (parsed.source, parsed.target)
    difference = largest_difference(megatron, directory)
    print(f"largest difference of log-probs to transformers: {difference:.2e} (at most {TOLERANCE:.0e} passes)")
    return 0 if difference <= TOLERANCE else 1


class _Report:
    """A bar with bytes and bytes per second; lines where the output is no terminal."""

    def __init__(self, target: str) -> None:
        self.target, self.done, self.started, self.told = target, 0, time.perf_counter(), time.perf_counter()
        self.bar = None
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task(target, total=None)

    def __enter__(self) -> _Report:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, total: int, done: int) -> None:
        self.done += done
        now = time.perf_counter()
        if self.bar:
            self.bar.update(self.task, total=total, completed=self.done)
        elif now - self.told >= INTERVAL or self.done == total:
            self.told = now
            speed = self.done / (now - self.started) / 1e9
            print(f"{self.target}: {self.done:,} of {total:,} bytes, {speed:.2f} GB/s", file=sys.stderr, flush=True)
