"""Reads Megatron's distributed checkpoints (torch_dist): the index by a restricted unpickler, chunks one at a time."""

from __future__ import annotations

import io
import json
import mmap
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box

#: written last by whoever saves a checkpoint
MARKER = "metadata.json"
INDEX = ".metadata"
#: Linux's; the module has no name for it
_MAP_NORESERVE = 0x4000
_CHECKPOINT = "torch.distributed.checkpoint"
#: Everything that the pickled index may name. dtypes of torch come on top.
ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    # Megatron adds every rank's plan where it saves with a cached structure.
    f"{_CHECKPOINT}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved part of a global tensor: ``box`` of ``key``, of which the whole has ``shape``."""

    key: str
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.key}{list(self.box.start)}"


class TorchDistReader:
    """A checkpoint's chunks.

    Attributes:
        chunks: name -> chunk.
        objects: keys of what is no tensor.

    Raises:
        CheckpointError: no marker, another format, an index that names anything but ALLOWED, and every file that is
            missing or cut off.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        check_marker(self.directory)
        metadata = read_index(self.directory / INDEX)
        self.chunks: dict[str, Chunk] = {}
        self.objects: list[str] = []
        self._begin: dict[tuple, tuple[bytes, Callable[[memoryview], Tensor]]] = {}
        self._mapped: dict[str, mmap.mmap] = {}
        faults, needed = [], dict[str, int]()
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                self.objects.append(key)
                continue
            for chunk in _chunks(key, entry, metadata.storage_data, faults):
                self.chunks[chunk.name] = chunk
                needed[chunk.file] = max(needed.get(chunk.file, 0), chunk.offset + chunk.length)
        for name, size in sorted(needed.items()):
            path = self.directory / name
            if Path(name).name != name or not path.is_file():
                faults.append(f"{path}: missing, {INDEX} names it")
            elif path.stat().st_size < size:
                faults.append(f"{path}: cut off, it has {path.stat().st_size:,} bytes of {size:,}")
        if faults:
            raise CheckpointError(*faults)

    def __getitem__(self, name: str) -> Tensor:
        """A chunk, mapped: reading it takes no memory of its own."""
        chunk = self.chunks[name]
        window = memoryview(self._map(chunk.file))[chunk.offset : chunk.offset + chunk.length]
        # Chunks of one shape begin alike: where the values of one lie, they lie in the other.
        same = (chunk.box.shape, chunk.dtype, chunk.length)
        start, values = self._begin.get(same, (None, None))
        if start is not None and window[: len(start)] == start:
            return values(window)
        try:
            # On "meta" torch.load says where in the file the values are, and does not read them.
            saved = torch.load(_Window(window), map_location="meta", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{self.directory / chunk.file}: {name} is damaged ({error})") from None
        if not isinstance(saved, Tensor) or tuple(saved.shape) != chunk.box.shape or saved.dtype != chunk.dtype:
            found = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else type(saved).__name__
            raise CheckpointError(f"{name}: found {found}, {INDEX} says {chunk.dtype} {list(chunk.box.shape)}")
        storage = saved.untyped_storage()
        count = storage.nbytes() // chunk.dtype.itemsize
        at, strides = storage._checkpoint_offset, (saved.shape, saved.stride(), saved.storage_offset())

        def values(window: memoryview) -> Tensor:
            return torch.frombuffer(window, dtype=chunk.dtype, count=count, offset=at).as_strided(*strides)

        self._begin[same] = bytes(window[:at]), values
        return values(window)

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._mapped:
            with open(self.directory / file, "rb") as opened:
                # Private and writable, for torch warns of memory that cannot be written; nobody writes, so none is set
                # aside for copies.
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                access = {"flags": flags, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
                self._mapped[file] = mmap.mmap(opened.fileno(), 0, **access)
        return self._mapped[file]


def read_index(path: Path) -> Metadata:
    """The pickled index of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or names anything but ALLOWED.
    """
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} holds no index of a distributed checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in ALLOWED.get(module, ()):
            return getattr(import_module(module), name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"{INDEX} names {module}.{name}, which no index needs: refused")


class _Window(io.RawIOBase):
    """Part of a mapped file as a file of its own."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def check_marker(directory: Path) -> None:
    path = directory / MARKER
    if not path.is_file():
        hint = "; it is a Hugging Face directory: --to megatron" if (directory / "config.json").is_file() else ""
        raise CheckpointError(
            f"{directory} has no {MARKER}, which is written last: it is no whole Megatron checkpoint{hint}"
        )
    try:
        backend = json.loads(path.read_text()).get("sharded_backend")
    except (ValueError, AttributeError):
        raise CheckpointError(f"{path} is damaged") from None
    if backend != "torch_dist":
        raise CheckpointError(f"{path}: sharded_backend = {backend!r}: only 'torch_dist' can be read")


def _chunks(key: str, entry: TensorStorageMetadata, storage: dict, faults: list[str]) -> list[Chunk]:
    chunks = []
    for chunk in entry.chunks:
        start = tuple(chunk.offsets)
        info = storage.get(MetadataIndex(key, chunk.offsets))
        if info is None:
            faults.append(f"{key}{list(start)}: {INDEX} does not say where it lies")
            continue
        box = Box(start, tuple(a + n for a, n in zip(start, chunk.sizes, strict=True)))
        dtype = entry.properties.dtype
        chunks.append(Chunk(key, box, tuple(entry.size), dtype, info.relative_path, info.offset, info.length))
    return chunks
