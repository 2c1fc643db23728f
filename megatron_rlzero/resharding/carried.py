"""Tensors that no model of this project has, an image encoder's for one: copied between directories, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.safetensors_files import (
    DTYPES,
    OTHERS,
    SafetensorsReader,
    SafetensorsWriter,
    Spec,
)


class Carried:
    """The tensors of a directory whose names do not begin with ``prefix``; none where it is empty.

    Attributes:
        specs: tensor -> shape and dtype.

    Raises:
        CheckpointError: the directory has no weights, or is damaged, or has tensors of another format; names them.
    """

    def __init__(self, directory: str | Path, prefix: str) -> None:
        self.specs: dict[str, Spec] = {}
        if not prefix:
            return
        try:
            self._reader = SafetensorsReader(directory)
        except CheckpointError as error:
            more = f"; all tensors that are not of {prefix[:-1]} come from there"
            raise CheckpointError(*(fault + more for fault in error.faults)) from None
        for name, (shape, dtype) in self._reader.specs.items():
            if not name.startswith(prefix):
                self.specs[name] = Spec(shape, OTHERS.get(dtype, dtype))
        formats = {name: spec.dtype for name, spec in self.specs.items() if isinstance(spec.dtype, str)}
        if formats:
            known = ", ".join((*DTYPES, *OTHERS))
            raise CheckpointError(*(f"{n}: dtype {f} cannot be copied, only {known}" for n, f in formats.items()))

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return sum(map(self._nbytes, self.specs))

    def copy(
        self, writer: SafetensorsWriter, names: Iterable[str], done: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Writes tensors, whose values may be any; ``done`` is told the bytes of each."""
        for name in names:
            # Mapped: only what is being written is in memory.
            writer.write(name, Box.whole(self.specs[name].shape), self._reader[name])
            done(self._nbytes(name))

    def _nbytes(self, name: str) -> int:
        shape, dtype = self.specs[name]
        return prod(shape) * dtype.itemsize
