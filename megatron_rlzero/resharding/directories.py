"""Checkpoint directories are whole or absent: written beside the target, moved into its place last."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: what a directory that is being written ends with; it is never read
PARTIAL = ".partial"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or a target that cannot be written; ``faults`` has a line for each cause."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def refuse_partial(directory: str | Path) -> None:
    """Raises CheckpointError for a directory that an interrupted conversion has left, or that is not there."""
    path = Path(directory)
    if path.name.endswith(PARTIAL):
        raise CheckpointError(f"{path} is half written: a conversion was interrupted or is running; run it again")
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")


def partial_of(target: str | Path) -> Path:
    """Where ``target`` is written before it is whole."""
    target = Path(target).absolute()
    return target.with_name(target.name + PARTIAL)


@contextmanager
def staged(target: str | Path, replace: bool = False) -> Iterator[Path]:
    """A directory beside ``target`` to write into, which becomes ``target`` when the block ends without an error.

    A partial directory that a dead process left is emptied and used again. After an error nothing is left.

    Args:
        replace: put it in the place of a directory that is there, once it is whole.

    Raises:
        CheckpointError: the target exists and is not empty, or another process is writing it.
    """
    target, partial = Path(target).absolute(), partial_of(target)
    if target.name.endswith(PARTIAL):
        raise CheckpointError(
            f"{target}: names that end with {PARTIAL} are of half-written directories; choose another"
        )
    if not replace and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise CheckpointError(f"{target} exists and is not empty; remove it or name another target")
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when this process dies
        if not (partial.exists() and os.path.samestat(partial.stat(), os.fstat(lock))):
            raise BlockingIOError  # it has just been moved into place
    except BlockingIOError:
        os.close(lock)
        raise CheckpointError(f"another process is writing {partial}") from None
    try:
        _clear(partial)
        yield partial
        for path in sorted(partial.rglob("*")):
            sync(path)
        sync(partial)
        if replace and target.exists():
            old = target.with_name(target.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
            os.rename(partial, target)
            shutil.rmtree(old)
        else:
            os.rename(partial, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a directory, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def carry_over(source: Path, target: Path, weights: Sequence[str], besides: Sequence[str] = ()) -> None:
    """Copies the files of a directory except those whose names end with one of ``weights`` or are in ``besides``."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(tuple(weights)) and file.name not in besides:
            shutil.copyfile(file, target / file.name)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
