"""A directory of safetensors files as a layout of whole tensors: mapped for reading, streamed for writing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box
from megatron_rlzero.resharding.output_files import OutputFile, allocate

INDEX = "model.safetensors.index.json"
#: A file that is written holds at most this many bytes of tensors.
SHARD_BYTES = 5 * 10**9
#: names of floating-point formats in the files
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: of formats in which tensors are copied alone
OTHERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in (DTYPES | OTHERS).items()}


class Spec(NamedTuple):
    """Shape and format of a tensor; the format is the files' name of it where torch has none of that precision."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class SafetensorsReader:
    """Tensors of a directory, mapped: reading one takes no memory of its own.

    With an index the files that it names are read, else all of the directory.

    Attributes:
        specs: tensor -> shape and dtype.

    Raises:
        CheckpointError: lists files that are missing or cut off, tensors that two files hold, and differences between
            the index and the files.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.specs: dict[str, Spec] = {}
        self._files: dict[str, safe_open] = {}
        faults: list[str] = []
        index = _index(self.directory, faults)
        names = (
            sorted({*index.values()})
            if index is not None
            else sorted(f.name for f in self.directory.glob("*.safetensors"))
        )
        if not names:
            faults.append(f"{self.directory} has no safetensors file")
        held: dict[str, str] = {}
        for name in names:
            try:
                file = safe_open(self.directory / name, "pt")
            except FileNotFoundError:
                faults.append(f"{self.directory / name}: missing, {INDEX} names it")
                continue
            except SafetensorError as error:
                faults.append(f"{self.directory / name}: cut off or damaged ({error})")
                continue
            for tensor in file.keys():  # noqa: SIM118
                if tensor in held:
                    faults.append(f"{tensor} is in two files, {held[tensor]} and {name}")
                held[tensor] = name
                found = file.get_slice(tensor)
                dtype = found.get_dtype()
                self.specs[tensor] = Spec(tuple(found.get_shape()), DTYPES.get(dtype, dtype))
                self._files[tensor] = file
        if index is not None and not faults:
            faults += [
                f"{t}: {INDEX} says {index[t]}, found in {held.get(t, 'no file')}"
                for t in index
                if held.get(t) != index[t]
            ]
            faults += [f"{t}: in {held[t]}, {INDEX} does not name it" for t in held if t not in index]
        if faults:
            raise CheckpointError(*faults)

    def __getitem__(self, tensor: str) -> Tensor:
        return self._files[tensor].get_tensor(tensor)


def _index(directory: Path, faults: list[str]) -> dict[str, str] | None:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            faults.extend(f"{name} is listed twice in {INDEX}" for name in seen if names.count(name) > 1)
        return seen

    path = directory / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(), object_pairs_hook=unique)["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({type(error).__name__}: {error})") from None
    if outside := sorted({f for f in index.values() if Path(f).name != f}):
        raise CheckpointError(*(f"{path} names {f!r}, which is not a file of the directory" for f in outside))
    return index


class SafetensorsWriter:
    """Writes tensors, in parts and in any order, into files whose headers and sizes are fixed at the start.

    Args:
        specs: tensor -> shape and dtype, in the order of the files.
        first: makes the files; further processes that write to the same directory pass False, later.

    Raises:
        OSError: the disk is full; says how much is needed and available.
    """

    def __init__(
        self, directory: Path, specs: Mapping[str, Spec], shard_bytes: int = SHARD_BYTES, first: bool = True
    ) -> None:
        self.directory, self.specs = directory, specs
        self._at: dict[str, tuple[OutputFile, int]] = {}
        self._files: dict[str, OutputFile] = {}
        shards = _shards(specs, shard_bytes)
        for i, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            header, starts, size = _header(shard, specs)
            file = OutputFile(allocate(directory / name, size) if first else os.open(directory / name, os.O_RDWR))
            self._files[name] = file
            self._at |= {tensor: (file, start) for tensor, start in starts.items()}
            if first:
                file.write(header, 0)
        if first and len(shards) > 1:
            weight_map = {t: name for name, shard in zip(self._files, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": sum(map(_nbytes, specs.values()))}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, tensor: str, box: Box, values: Tensor) -> None:
        """Writes rows of a tensor: ``box`` is whole but for its first axis. Threads may call it at once."""
        file, start = self._at[tensor]
        shape, dtype = self.specs[tensor]
        rows = (*box.shape[:1], *shape[1:])
        if values.dtype != dtype or not tuple(values.shape) == box.shape == rows:
            raise ValueError(f"{tensor}: {values.dtype} {list(values.shape)} for {dtype} {list(rows)}")
        row = Box.whole(shape[1:]).numel * dtype.itemsize
        file.write(as_bytes(values), start + sum(box.start[:1]) * row)

    def close(self) -> None:
        """Waits until the files are on the disk and closes them."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def as_bytes(values: Tensor) -> memoryview:
    """The bytes of a tensor, copied only if they do not lie in one piece."""
    return memoryview(values.contiguous().flatten().view(torch.uint8).numpy())


def _nbytes(spec: Spec) -> int:
    return Box.whole(spec.shape).numel * spec.dtype.itemsize


def _shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + _nbytes(spec) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _nbytes(spec)
    return shards


def _header(names: list[str], specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int], int]:
    """Length and JSON of the header, each tensor's place in the file, and the file's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    # As the library does, wide formats first: every tensor is then aligned.
    for name in sorted(names, key=lambda n: -specs[n].dtype.itemsize):
        shape, dtype = specs[name]
        size = _nbytes(specs[name])
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        offsets[name], at = at, at + size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + o for n, o in offsets.items()}, start + at
