"""Several processes that write one directory together: who does what, and what has become of the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rlzero.resharding.directories import CheckpointError, partial_of, staged

if TYPE_CHECKING:
    from torch.distributed import Store


class Team:
    """One process, or several that see one file system; the first makes the directory and moves it into place.

    Args:
        store: that all of them reach, new. What is told through it is JSON.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, size: int = 1) -> None:
        self.store, self.rank, self.size = store, rank, size

    @contextmanager
    def staged(self, target: str | Path) -> Iterator[Path]:
        """``directories.staged`` for all; a fault of one process is raised in every one that waits for it.

        Raises:
            CheckpointError: also for a fault of another process.
        """
        if self.rank:
            self.ask("directory")
            try:
                yield partial_of(target)
            except BaseException as error:
                self._tell(f"done by {self.rank}", fault=f"{type(error).__name__}: {error}")
                raise
            self.ask("end")
            self.tell(f"left by {self.rank}", None)
            return
        fault: str | None = "stopped"
        try:
            with staged(target) as partial:
                self.tell("directory", None)
                yield partial
            fault = None
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            if fault:
                self._tell("directory", fault=fault)
                self._tell("files", fault=fault)
            self._tell("end", fault=fault)
        for rank in range(1, self.size):  # the store may be this process's, and they still read the end from it
            self.ask(f"left by {rank}")

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in the first one when all are done; nothing in the others."""
        if self.rank:
            self.tell(f"done by {self.rank}", value)
            return []
        return [value, *(self.ask(f"done by {rank}") for rank in range(1, self.size))]

    def tell(self, what: str, value: Any) -> None:
        """Lets the others go on that ``ask``."""
        self._tell(what, value=value)

    def ask(self, what: str) -> Any:
        """Waits until another process has told ``what``."""
        told = json.loads(self.store.get(what))
        if told.get("fault"):
            raise CheckpointError(f"another process of the conversion: {told['fault']}")
        return told.get("value")

    def _tell(self, what: str, **told: Any) -> None:
        if self.store is not None:
            self.store.set(what, json.dumps(told))
