"""Writes Megatron's distributed checkpoints (torch_dist) chunk by chunk, as the ranks of a layout would together."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rlzero.resharding.directories import allocate
from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.torch_dist import INDEX, MARKER

#: what torch.save adds to the bytes of a tensor, at most
OVERHEAD = 4096


#: key, start in the global tensor (None for an object), file, offset, length
Where = tuple[str, Sequence[int] | None, str, int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk to write: ``box`` of the global tensor ``key`` of ``shape``, into the file of ``rank``."""

    rank: int
    key: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.key}{list(self.box.start)}"

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


class TorchDistWriter:
    """Files ``__{rank}_0.distcp``, and then the index.

    Args:
        parts: all that is to be written by this process.
        objects: key of an object -> rank that writes it. All of them are empty states of modules.
        common: what Megatron calls the common state.

    Raises:
        OSError: the disk is full; says how much is needed and available.
    """

    def __init__(self, directory: Path, parts: Iterable[Part], objects: dict[str, int], common: dict[str, Any]) -> None:
        self.directory = directory
        self._where: list[Where] = []
        self._files: dict[int, BinaryIO] = {}
        sizes: dict[int, int] = {}
        for part in parts:
            sizes[part.rank] = sizes.get(part.rank, 0) + part.nbytes + OVERHEAD
        for rank in objects.values():
            sizes[rank] = sizes.get(rank, 0) + OVERHEAD
        for rank, size in sorted(sizes.items()):
            self._files[rank] = os.fdopen(allocate(directory / _file(rank), size), "wb")
        if 0 in self._files:
            self._write_object(0, "common_state/shard_0_1", common)
        for key, rank in objects.items():
            # An empty state is what TransformerEngine's modules keep outside fp8, and Megatron's own disregard.
            self._write_object(rank, key, torch.empty(0, dtype=torch.uint8))

    def write(self, part: Part, values: Tensor) -> None:
        """Appends a chunk; ``values`` has the box's shape and its own storage, since torch.save writes whole ones."""
        if values.dtype != part.dtype or tuple(values.shape) != part.box.shape:
            raise ValueError(f"{part.name}: {values.dtype} {list(values.shape)}, not {part.dtype} {part.box.shape}")
        with _no_checksums():
            self._append(part.rank, part.key, part.box.start, values)

    def _write_object(self, rank: int, key: str, value: object) -> None:
        self._append(rank, key, None, [value])

    def _append(self, rank: int, key: str, start: Sequence[int] | None, value: object) -> None:
        file = self._files[rank]
        offset = file.tell()
        torch.save(value, file)
        self._where.append((key, start, _file(rank), offset, file.tell() - offset))

    def close(self) -> list[Where]:
        """Cuts the files to their length, waits until they are on the disk; where everything lies."""
        for file in self._files.values():
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files.clear()
        return self._where


def write_index(directory: Path, parts: Iterable[Part], where: Iterable[Where]) -> None:
    """Writes the index of all processes' chunks and objects, and then the marker.

    Raises:
        ValueError: a chunk of ``parts`` that nobody has written.
    """
    storage = {MetadataIndex(key, start): _StorageInfo(*place) for key, start, *place in where}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for part in parts:
        if MetadataIndex(part.key, part.box.start) not in storage:
            raise ValueError(f"{part.name} has not been written")
        if part.key not in entries:
            entries[part.key] = TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(part.shape), [])
        chunk = ChunkStorageMetadata(torch.Size(part.box.start), torch.Size(part.box.shape))
        entries[part.key].chunks.append(chunk)
    entries |= {index.fqn: BytesStorageMetadata() for index in storage if index.offset is None}
    metadata = Metadata(entries, storage_data=storage, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    (directory / INDEX).write_bytes(pickle.dumps(metadata))
    (directory / MARKER).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


@contextmanager
def _no_checksums() -> Iterator[None]:
    """torch.load does not look at the zip checksums, which cost as much as the writing."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
