"""Hugging Face directories to Megatron's distributed checkpoints and back: plans the pieces, then streams them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from json import JSONDecodeError
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.architectures import Architecture, architecture, language_prefix, read_config, wrong_counts
from megatron_rlzero.architectures.checkpoint_layout import OUTPUT_LAYER, shards
from megatron_rlzero.architectures.checkpoint_names import place
from megatron_rlzero.architectures.layouts import Parallel
from megatron_rlzero.checkpoints import CONFIG, WEIGHTS, open_hf, open_megatron
from megatron_rlzero.resharding.carried import Carried
from megatron_rlzero.resharding.directories import CheckpointError, carry_over, refuse_partial
from megatron_rlzero.resharding.layout import Box, Layout, whole_tensors
from megatron_rlzero.resharding.plan import Transfer, plan
from megatron_rlzero.resharding.safetensors_files import (
    SHARD_BYTES,
    SafetensorsWriter,
    Spec,
)
from megatron_rlzero.resharding.streaming import Target, integers, stream
from megatron_rlzero.resharding.team import Team
from megatron_rlzero.resharding.torch_dist import INDEX, MARKER, check_marker
from megatron_rlzero.resharding.torch_dist_writer import Part, TorchDistWriter, write_index

#: where a Megatron checkpoint keeps configuration, tokenizer files, and tensors that are not of the language model
HF = "hf"
#: what Megatron calls the common state
COMMON = {"checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": False}}

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
    reader, pieces, faults = open_hf(source, family, hf)
    chunks, wrong_sizes = shards(family, hf, parallel, naming)
    _raise(faults + wrong_sizes)
    carried = Carried(source, language_prefix(hf))
    layout: Layout = defaultdict(list)
    for chunk in chunks:
        layout[chunk.rank].extend(chunk.pieces)
    transfers = plan({0: pieces}, layout)
    keys = {chunk.name: chunk.key for chunk in chunks}
    by_key, by_chunk = (_group(transfers, key) for key in (lambda t: keys[t.target_local], lambda t: t.target_local))
    dtypes = _one_dtype(by_key, lambda t: reader.specs[t.source_local].dtype)
    parts = [Part(c.rank, c.key, c.box, c.shape, dtypes[c.key]) for c in chunks]
    # A tied output layer has no weight of its own, and a state.
    objects = dict.fromkeys(place(OUTPUT_LAYER, naming, 0, 0).states, 0)
    objects |= {key: chunk.rank for chunk in reversed(chunks) for key in chunk.place.states}
    team = team or Team()
    own = [part for part in parts if part.rank % team.size == team.rank]
    with team.staged(target) as partial:
        mine = {key: rank for key, rank in objects.items() if rank % team.size == team.rank}
        writer = TorchDistWriter(partial, own, mine, COMMON)
        total = sum(part.nbytes for part in own)
        if team.rank == 0:
            (partial / HF).mkdir()
            total += carried.nbytes
        done = _counter(progress, total)
        if team.rank == 0 and language_prefix(hf):
            beside = SafetensorsWriter(partial / HF, carried.specs)
            carried.copy(beside, carried.specs, done)
            beside.close()
        by_name = {part.name: part for part in own}
        stream(
            [Target(part.name, part.box.shape, part.dtype, by_chunk.get(part.name, ())) for part in own],
            reader.__getitem__,
            lambda transfer, values: _check_finite(transfer.source_local, values),
            _reporting(done, lambda target, box, values: writer.write(by_name[target.name], box, values)),
        )
        where = team.gather(writer.close())
        if team.rank == 0:
            carry_over(source, partial / HF, WEIGHTS)
            write_index(partial, parts, [place for places in where for place in places])
    return sum(part.nbytes for part in parts) + carried.nbytes


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
        config: Hugging Face directory from which configuration, tokenizer files and tensors that are not of the
            language model come; by default those that ``to_megatron`` has put into the checkpoint.

    Returns, Raises: as to_megatron.
    """
    source = Path(source)
    refuse_partial(source)
    check_marker(source)
    origin = Path(config) if config is not None else source / HF
    if not (origin / CONFIG).is_file():
        raise CheckpointError(f"{origin} has no {CONFIG}; name a Hugging Face directory of the model with --config")
    family, hf = _family(origin)
    reader, pieces, faults = open_megatron(source, family, hf)
    _raise(faults)
    shapes = family.tensors(hf)
    try:
        transfers = plan({0: pieces}, {0: whole_tensors(shapes)})
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    by_tensor = _group(transfers, lambda t: t.tensor)
    dtypes = _one_dtype(by_tensor, lambda t: reader.chunks[t.source_local].dtype)
    carried = Carried(origin, language_prefix(hf))
    specs = {name: Spec(shape, dtypes[name]) for name, shape in shapes.items()} | carried.specs
    team = team or Team()
    names = list(specs)[team.rank :: team.size]
    own = [Target(n, *specs[n], by_tensor[n]) for n in names if n in shapes]
    with team.staged(target) as partial:
        if team.rank:
            team.ask("files")
        writer = SafetensorsWriter(partial, specs, shard_bytes, first=team.rank == 0)
        team.tell("files", None)
        done = _counter(progress, sum(prod(specs[n].shape) * specs[n].dtype.itemsize for n in names))
        carried.copy(writer, [n for n in names if n in carried.specs], done)
        stream(
            own,
            reader.__getitem__,
            lambda transfer, values: _check_finite(transfer.tensor, values),
            _reporting(done, lambda target, box, values: writer.write(target.name, box, values)),
        )
        writer.close()
        team.gather(None)
        if team.rank == 0:
            carry_over(origin, partial, WEIGHTS, (CONFIG, INDEX, MARKER))
            # Nothing loads a directory without it: it says that all of the rest is there.
            (partial / CONFIG).write_bytes((origin / CONFIG).read_bytes())
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())


def _family(directory: Path) -> tuple[Architecture, dict[str, Any]]:
    if not (directory / CONFIG).is_file():
        hint = "; it is a Megatron checkpoint: --to hf" if (directory / MARKER).is_file() else ""
        raise CheckpointError(f"{directory} has no {CONFIG}: it is no whole Hugging Face directory{hint}")
    try:
        hf = read_config(directory)
        family = architecture(hf)
        _raise([f"{directory / CONFIG}: {line}" for line in wrong_counts(hf) or family.unsupported(hf)])
        family.tensors(hf)
    except KeyError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error} is missing") from None
    except CheckpointError:
        raise
    except JSONDecodeError as error:
        raise CheckpointError(f"{directory / CONFIG} is no JSON: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG}: {error}") from None
    return family, hf


def _raise(faults: Sequence[str]) -> None:
    if faults:
        raise CheckpointError(*faults)


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


def _counter(progress: Progress, total: int) -> Callable[[int], None]:
    """Reports bytes that are done, for one thread at a time."""
    lock = Lock()

    def done(nbytes: int) -> None:
        with lock:
            progress(total, nbytes)

    return done


def _reporting(
    done: Callable[[int], None], write: Callable[[Target, Box, Tensor], None]
) -> Callable[[Target, Box, Tensor], None]:
    """``write``, of which each call is reported."""

    def written(target: Target, box: Box, values: Tensor) -> None:
        write(target, box, values)
        done(values.nbytes)

    return written


def _check_finite(name: str, values: Tensor) -> None:
    # Among bits taken as integers, those of NaN and infinity are the largest: of a positive one signed, of a negative
    # one unsigned.
    bits = integers(values)
    infinity, negative = (int(integers(torch.tensor(sign * torch.inf, dtype=values.dtype))) for sign in (1, -1))
    unsigned = bits.view(f"u{bits.dtype.itemsize}")
    if bits.max() >= infinity or unsigned.max() >= negative % 2 ** (8 * bits.dtype.itemsize):
        raise CheckpointError(f"{name}: NaN or infinity among its values; mend the source")
