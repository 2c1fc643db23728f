"""Writes Megatron's distributed checkpoints (torch_dist) chunk by chunk, as the ranks of a layout would together."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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

from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.output_files import OutputFile, allocate
from megatron_rlzero.resharding.safetensors_files import as_bytes
from megatron_rlzero.resharding.torch_dist import INDEX, MARKER

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
    """Files ``__{rank}_0.distcp``, whose contents and sizes are fixed at the start, and then the index.

    Args:
        parts: all that is to be written by this process.
        objects: key of an object -> rank that writes it. All of them are empty states of modules.
        common: what Megatron calls the common state.

    Raises:
        OSError: the disk is full; says how much is needed and available.
    """

    def __init__(self, directory: Path, parts: Iterable[Part], objects: dict[str, int], common: dict[str, Any]) -> None:
        self._files: dict[int, OutputFile] = {}
        self._where: dict[str, Where] = {}
        self._left: dict[str, int] = {}
        sizes: dict[int, int] = {}

        def place(rank: int, name: str, key: str, start: Sequence[int] | None, length: int) -> None:
            offset = sizes.get(rank, 0)
            sizes[rank] = offset + length
            self._where[name] = (key, start, _file(rank), offset, length)

        parts = list(parts)
        # An empty state is what TransformerEngine's modules keep outside fp8, and Megatron's own disregard.
        empty = _saved([torch.empty(0, dtype=torch.uint8)])
        contents = {key: (rank, empty) for key, rank in objects.items()}
        if 0 in {part.rank for part in parts} | {*objects.values()}:
            contents = {"common_state/shard_0_1": (0, _saved([common]))} | contents
        for key, (rank, content) in contents.items():
            place(rank, key, key, None, len(content))
        for part in parts:
            place(part.rank, part.name, part.key, part.box.start, part.nbytes + sum(map(len, _around(part))))
            self._left[part.name] = part.nbytes
        for rank, size in sorted(sizes.items()):
            self._files[rank] = OutputFile(allocate(directory / _file(rank), size))
        for key, (rank, content) in contents.items():
            self._files[rank].write(content, self._where[key][3])

    def write(self, part: Part, box: Box, values: Tensor) -> None:
        """Writes rows of a chunk: ``box`` counts from the chunk's own start, and is whole but for its first axis.

        The chunk's leading axes may be folded into the first. Threads may call it at once for different chunks.
        """
        if values.dtype != part.dtype or tuple(values.shape) != box.shape:
            raise ValueError(f"{part.name}: {values.dtype} {list(values.shape)}, not {part.dtype} {list(box.shape)}")
        before, after = _around(part)
        offset = self._where[part.name][3]
        row = values.nbytes // max(values.shape[0], 1)
        self._files[part.rank].write(as_bytes(values), offset + len(before) + box.start[0] * row)
        self._left[part.name] -= values.nbytes
        if self._left[part.name] == 0:
            self._files[part.rank].write(before, offset)
            self._files[part.rank].write(after, offset + len(before) + part.nbytes)

    def close(self) -> list[Where]:
        """Waits until the files are on the disk; where all that is whole lies."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        return [where for name, where in self._where.items() if not self._left.get(name)]


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


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _around(part: Part) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the values of a chunk."""
    return _archive(part.dtype, part.box.shape)


@cache
def _archive(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    before = torch.serialization.get_crc32_options()
    # torch.load does not look at the zip checksums, which cost as much as the writing.
    torch.serialization.set_crc32_options(False)
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(shape, dtype=dtype), around := _Around())
    finally:
        torch.serialization.set_crc32_options(before)
    return bytes(around.parts[0]), bytes(around.parts[1])


class _Around:
    """A file that keeps what is written before and after the one place that is passed over."""

    def __init__(self) -> None:
        self.parts, self._at = [bytearray()], 0

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        self._at += offset
        self.parts.append(bytearray())
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass
