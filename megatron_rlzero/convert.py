"""Hugging Face directories to Megatron's distributed checkpoints and back: plans the pieces, then streams them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.architectures import Architecture, architecture, read_config
from megatron_rlzero.architectures.checkpoint_layout import OUTPUT_LAYER, shards, stored_pieces
from megatron_rlzero.architectures.checkpoint_names import place
from megatron_rlzero.architectures.hf_layout import held_pieces
from megatron_rlzero.architectures.layouts import Parallel
from megatron_rlzero.resharding.directories import CheckpointError, carry_over, refuse_partial
from megatron_rlzero.resharding.layout import Box, Layout, whole_tensors
from megatron_rlzero.resharding.plan import Transfer, plan
from megatron_rlzero.resharding.safetensors_files import (
    DTYPES,
    SHARD_BYTES,
    SafetensorsReader,
    SafetensorsWriter,
    Spec,
    as_bytes,
)
from megatron_rlzero.resharding.team import Team
from megatron_rlzero.resharding.torch_dist import INDEX, MARKER, TorchDistReader
from megatron_rlzero.resharding.torch_dist_writer import Part, TorchDistWriter, write_index

#: where a Megatron checkpoint keeps configuration and tokenizer files
HF = "hf"
CONFIG = "config.json"
#: ends of names of files that hold weights, or say where they are
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp", ".index.json")
FLOATS = frozenset(DTYPES.values())
#: what Megatron calls the common state
COMMON = {"checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": False}}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

#: told the size of the whole in bytes and of each part that is done
Progress = Callable[[int, int], None]


def to_megatron(
    source: str | Path,
    target: str | Path,
    parallel: Parallel,
    naming: str = "hybrid",
    progress: Progress = lambda total, done: None,
    team: Team | None = None,
) -> int:
    """Writes a Hugging Face directory as the distributed checkpoint that the ranks of ``parallel`` would save.

    Args:
        naming: ``hybrid`` or ``gpt``, the names of Megatron's HybridModel or of its GPTModel.
        team: processes that share the work, each some ranks' files; this one alone by default.

    Returns:
        Bytes of tensors written.

    Raises:
        CheckpointError: lists every fault of the source, of the sizes and of the target; the target is untouched.
        OSError: the disk is full.
    """
    source = Path(source)
    refuse_partial(source)
    family, hf = _family(source)
    reader = SafetensorsReader(source)
    pieces, faults = held_pieces(_expected(family, hf, reader), {n: s.shape for n, s in reader.specs.items()})
    faults += _not_floats({n: s.dtype for n, s in reader.specs.items()})
    chunks, wrong_sizes = shards(family, hf, parallel, naming)
    _raise(faults + wrong_sizes)
    layout: Layout = defaultdict(list)
    for chunk in chunks:
        layout[chunk.rank].extend(chunk.pieces)
    transfers = plan({0: pieces}, layout)
    keys = {chunk.name: chunk.place.key for chunk in chunks}
    by_key, by_chunk = (_group(transfers, key) for key in (lambda t: keys[t.target_local], lambda t: t.target_local))
    dtypes = _one_dtype(by_key, lambda t: reader.specs[t.source_local].dtype)
    parts = [Part(c.rank, c.place.key, c.box, c.shape, dtypes[c.place.key]) for c in chunks]
    # A tied output layer has no weight of its own, and a state.
    objects = dict.fromkeys(place(OUTPUT_LAYER, naming, 0, 0).states, 0)
    objects |= {key: chunk.rank for chunk in reversed(chunks) for key in chunk.place.states}
    team = team or Team()
    own = [part for part in parts if part.rank % team.size == team.rank]
    with team.staged(target) as partial:
        mine = {key: rank for key, rank in objects.items() if rank % team.size == team.rank}
        writer = TorchDistWriter(partial, own, mine, COMMON)
        assemble = _Assembly(reader, max(part.nbytes for part in parts))
        chunks_in_turn = _ahead(lambda part: assemble(by_chunk.get(part.name, ()), part), own)
        for part, values in zip(own, chunks_in_turn, strict=True):
            writer.write(part, values)
            progress(sum(part.nbytes for part in own), part.nbytes)
        where = team.gather(writer.close())
        if team.rank == 0:
            (partial / HF).mkdir()
            carry_over(source, partial / HF, WEIGHTS)
            write_index(partial, parts, [place for places in where for place in places])
    return sum(part.nbytes for part in parts)


def to_hf(
    source: str | Path,
    target: str | Path,
    config: str | Path | None = None,
    progress: Progress = lambda total, done: None,
    shard_bytes: int = SHARD_BYTES,
    team: Team | None = None,
) -> int:
    """Writes a distributed checkpoint as a Hugging Face directory.

    Args:
        config: Hugging Face directory from which configuration and tokenizer files come; by default those that
            ``to_megatron`` has put into the checkpoint.

    Returns, Raises: as to_megatron.
    """
    source = Path(source)
    refuse_partial(source)
    reader = TorchDistReader(source)
    origin = Path(config) if config is not None else source / HF
    if not (origin / CONFIG).is_file():
        raise CheckpointError(f"{origin} has no {CONFIG}; name a Hugging Face directory of the model with --config")
    family, hf = _family(origin)
    pieces, faults = stored_pieces(family, hf, reader.chunks.values(), reader.objects)
    used = {piece.local for piece in pieces}
    faults += _not_floats({name: reader.chunks[name].dtype for name in sorted(used)})
    _raise(faults)
    shapes = family.tensors(hf)
    try:
        transfers = plan({0: pieces}, {0: whole_tensors(shapes)})
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    dtypes = _one_dtype(_group(transfers, lambda t: t.tensor), lambda t: reader.chunks[t.source_local].dtype)
    by_chunk = _group(transfers, lambda t: t.source_local)
    specs = {name: Spec(shape, dtypes[name]) for name, shape in shapes.items()}
    order = sorted(by_chunk, key=lambda name: (reader.chunks[name].file, reader.chunks[name].offset))
    team = team or Team()
    own = order[team.rank :: team.size]
    share = sum(t.box.numel * dtypes[t.tensor].itemsize for name in own for t in by_chunk[name])
    with team.staged(target) as partial:
        if team.rank:
            team.ask("files")
        writer = SafetensorsWriter(partial, specs, shard_bytes, first=team.rank == 0)
        team.tell("files", None)
        for name, views in zip(own, _ahead(lambda name: _take_apart(by_chunk[name], reader), own), strict=True):
            for transfer, view in zip(by_chunk[name], views, strict=True):
                writer.write(transfer.tensor, transfer.target_box, view)
                progress(share, view.nbytes)
        writer.close()
        team.gather(None)
        if team.rank == 0:
            carry_over(origin, partial, WEIGHTS, (CONFIG, INDEX, MARKER))
            # Nothing loads a directory without it: it says that all of the rest is there.
            (partial / CONFIG).write_bytes((origin / CONFIG).read_bytes())
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


def _family(directory: Path) -> tuple[Architecture, dict[str, Any]]:
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}: it is no whole Hugging Face directory")
    try:
        hf = read_config(directory)
        family = architecture(hf)
        _raise([f"{directory / CONFIG}: {line}" for line in family.unsupported(hf)])
        family.tensors(hf)
    except KeyError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error} is missing") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from None
    return family, hf


def _expected(family: Architecture, hf: dict[str, Any], reader: SafetensorsReader) -> dict[str, tuple[int, ...]]:
    """Tensors and shapes of config.json, and a copy of a tied embedding if there is one and it is equal."""
    shapes = dict(family.tensors(hf))
    if HEAD not in shapes and {HEAD, EMBEDDING} <= reader.specs.keys():
        if reader.specs[HEAD] != reader.specs[EMBEDDING] or not torch.equal(
            *(reader[name].flatten().view(torch.uint8) for name in (HEAD, EMBEDDING))
        ):
            raise CheckpointError(
                f"{HEAD} is not {EMBEDDING}, but config.json has tie_word_embeddings: remove the tensor or untie them"
            )
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def _raise(faults: Sequence[str]) -> None:
    if faults:
        raise CheckpointError(*faults)


def _not_floats(dtypes: Mapping[str, torch.dtype | str]) -> list[str]:
    known = ", ".join(sorted(str(d).removeprefix("torch.") for d in FLOATS))
    return [f"{n}: dtype {d}, expected one of {known}" for n, d in dtypes.items() if d not in FLOATS]


def _group(transfers: Iterable[Transfer], key: Callable[[Transfer], str]) -> dict[str, list[Transfer]]:
    groups: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault(key(transfer), []).append(transfer)
    return groups


def _one_dtype(
    groups: Mapping[str, Sequence[Transfer]], dtype: Callable[[Transfer], torch.dtype]
) -> dict[str, torch.dtype]:
    """The dtype of each group, of which all tensors must have the same."""
    faults, result = [], {}
    for name, transfers in groups.items():
        found = {dtype(t): t.tensor for t in reversed(transfers)}
        if len(found) > 1:
            parts = ", ".join(f"{tensor} is {d}" for d, tensor in found.items())
            faults.append(f"{name}: wrong dtype, {parts}; what is stored as one tensor must have one")
        result[name] = next(iter(found))
    _raise(faults)
    return result


def _ahead[Item, Result](function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``map`` that computes one result ahead, in a thread, while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        before = None
        for item in items:
            coming = pool.submit(function, item)
            if before is not None:
                yield before.result()
            before = coming
        if before is not None:
            yield before.result()


def _take_apart(transfers: Sequence[Transfer], source: TorchDistReader) -> list[Tensor]:
    """What each transfer takes of the one chunk that all of them take from."""
    chunk = source[transfers[0].source_local]
    views = [_view(chunk, t.source_box) for t in transfers]
    for t, view in zip(transfers, views, strict=True):
        _check_finite(t.tensor, view)
    return views


class _Assembly:
    """Makes chunks: the mapped file's own bytes where they lie there in one piece, else copies in a buffer.

    There are two buffers, used in turn: a chunk is good until the one after the next is made.
    """

    def __init__(self, source: SafetensorsReader, largest: int) -> None:
        self.source, self.buffers = source, [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def __call__(self, transfers: Sequence[Transfer], part: Part) -> Tensor:
        """The chunk's values, in a storage of just their size: torch.save writes whole storages."""
        views = [_view(self.source[t.source_local], t.source_box) for t in transfers]
        for t, view in zip(transfers, views, strict=True):
            _check_finite(t.source_local, view)
        if len(views) == 1 and views[0].numel() == part.box.numel and views[0].is_contiguous():
            return torch.frombuffer(as_bytes(views[0]), dtype=part.dtype).view(part.box.shape)
        self.buffers.reverse()
        chunk = torch.frombuffer(as_bytes(self.buffers[0][: part.nbytes]), dtype=part.dtype).view(part.box.shape)
        if sum(view.numel() for view in views) < chunk.numel():
            chunk.zero_()  # rows of the padded vocabulary
        for t, view in zip(transfers, views, strict=True):
            _view(chunk, t.target_box).copy_(view)
        return chunk


def _view(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor whose leading axes are folded into the box's first one."""
    return tensor.flatten(0, tensor.dim() - len(box.start))[box.slices]


def _check_finite(name: str, values: Tensor) -> None:
    # A sum is one quick pass without memory of its own; that of finite values may overflow, so it only clears.
    if not torch.isfinite(values.sum()) and not all(map(torch.isfinite, torch.aminmax(values))):
        raise CheckpointError(f"{name}: NaN or infinity among its values; mend the source")
