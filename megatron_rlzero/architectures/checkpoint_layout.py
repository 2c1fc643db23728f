"""A Megatron distributed checkpoint as a layout: which boxes of which Hugging Face tensor lie in which stored chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron_rlzero.architectures.checkpoint_names import Place, find, naming_of, passed_over, place
from megatron_rlzero.architectures.layouts import Parallel, count_experts, expert_number, stage_of
from megatron_rlzero.architectures.rules import (
    Blocks,
    GroupedQKV,
    Rule,
    Split,
    Stacked,
    Vocabulary,
    padded_vocab_size,
)
from megatron_rlzero.resharding.layout import Box, Piece

if TYPE_CHECKING:
    from megatron_rlzero.architectures import Architecture

OUTPUT_LAYER = "output_layer.weight"


class Stored(Protocol):
    """A chunk of a checkpoint: ``box`` of the global tensor ``key`` of ``shape``."""

    key: str
    box: Box
    shape: tuple[int, ...]

    @property
    def name(self) -> str: ...


class Shard(NamedTuple):
    """A chunk of ``key`` to be written by ``rank``, and what it is made of; ``pieces`` name it as ``local``."""

    rank: int
    place: Place
    key: str
    box: Box
    shape: tuple[int, ...]
    pieces: list[Piece]

    @property
    def name(self) -> str:
        return _label(self.key, self.box)


def _label(key: str, box: Box) -> str:
    return f"{key}{list(box.start)}"


def smallest_world(tensor: int, pipeline: int, expert: int, expert_tensor: int) -> Parallel:
    """The layout of these sizes on as few ranks as they need: nothing is data parallel that need not be."""
    return Parallel(pipeline * lcm(tensor, expert * expert_tensor), tensor, pipeline, expert, expert_tensor)


def stored_pieces(
    family: Architecture, hf: dict[str, Any], chunks: Iterable[Stored], objects: Iterable[str]
) -> tuple[list[Piece], list[str]]:
    """What the chunks of a checkpoint hold, and faults: unknown keys, missing parameters, shapes that are wrong.

    A piece's ``local`` is the chunk's name; its local box lies in the chunk without the leading axes of layers and
    experts, which have length 1 in every chunk.
    """
    chunks = list(chunks)
    rules = _rules(family, hf, 1)
    naming = naming_of({chunk.key for chunk in chunks})
    if naming is None:
        return [], ["decoder.final_norm.weight (HybridModel) or decoder.final_layernorm.weight (GPTModel): missing"]
    if wrong := _wrong_naming(family, hf, naming):
        return [], [wrong]
    counts = _layers(rules), count_experts(rules)
    whole = {name: list(rule.pieces("", 0, 1)) for name, rule in rules.items()}
    pieces: list[Piece] = []
    faults: list[str] = []
    seen: set[tuple[str, int]] = set()
    for chunk in chunks:
        if passed_over(chunk.key):
            continue
        found = find(chunk.key, chunk.box.start, naming, rules)
        sizes = _parts(rules[found.parameter]) if found else ()
        if found is None or (found.part is not None and not sizes):
            faults.append(f"{chunk.name}: unknown, config.json implies no such parameter")
            continue
        at = place(found.parameter, naming, *counts)
        seen.add((found.parameter, found.part if at.blocks else 0))
        shape, first = _shape(whole[found.parameter]), 0
        if found.part is not None:
            shape, first = (sizes[found.part], *shape[1:]), sum(sizes[: found.part])
        wanted = (*at.axes[-found.axes :], *shape) if found.axes else shape
        if not _fits(chunk.shape, wanted, isinstance(rules[found.parameter], Vocabulary)):
            faults.append(f"{chunk.key}: found {list(chunk.shape)}, expected {list(wanted)}")
            continue
        if any(n != 1 for n in chunk.box.shape[: found.axes]):
            faults.append(
                f"{chunk.name}: one chunk holds several layers or experts; it must be saved by Megatron 0.14 or later"
            )
            continue
        box = Box(chunk.box.start[found.axes :], chunk.box.stop[found.axes :])
        for piece in whole[found.parameter]:
            stored = piece.local_box.shift((-first, *(0,) * (len(shape) - 1)))
            if common := stored.intersect(box):
                into = [c - s + t for c, s, t in zip(common.start, stored.start, piece.box.start, strict=True)]
                source = Box((0,) * len(into), common.shape).shift(into)
                pieces.append(Piece(piece.tensor, source, chunk.name, common.shift(-s for s in box.start)))
    faults += [f"{key}: unknown" for key in objects if not passed_over(key)]
    for name, rule in rules.items():
        at = place(name, naming, *counts)
        where = f" at {list(at.index)}" if at.index else ""
        faults += [
            f"{key}: missing{where}, expected {[*at.axes, *shape]}"
            for i, (key, _, shape) in enumerate(_tensors(at, rule))
            if (name, i) not in seen
        ]
    return pieces, list(dict.fromkeys(faults))


def shards(family: Architecture, hf: dict[str, Any], parallel: Parallel, naming: str) -> tuple[list[Shard], list[str]]:
    """The chunks that the ranks of a layout save, each by the first rank that holds it, and sizes that do not divide.

    The vocabulary is padded as Megatron does it, to a multiple of 128 times the tensor-parallel size.
    """
    if wrong := _wrong_naming(family, hf, naming):
        return [], [wrong]
    faults: list[str] = []
    rules = _rules(family, hf, parallel.tensor_model_parallel_size)
    layers, experts = _layers(rules), count_experts(rules)
    if experts and experts % parallel.expert_model_parallel_size:
        faults.append(
            f"expert_model_parallel_size = {parallel.expert_model_parallel_size} does not divide {experts} experts"
        )
    if not experts and parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size > 1:
        faults.append(
            "expert_model_parallel_size and expert_tensor_parallel_size are for models with experts: leave them 1"
        )
    stages = parallel.pipeline_model_parallel_size
    try:
        stages_of_layers = [s for s, cut in enumerate(family.layer_pattern(hf, stages).split("|")) for _ in cut]
    except ValueError as error:
        return [], [*faults, str(error)]
    result = []
    misfits: dict[str, list[str]] = {}
    for name, rule in rules.items():
        at, expert = place(name, naming, layers, experts), expert_number(name)
        size = parallel.tensor_model_parallel_size if expert is None else parallel.expert_tensor_parallel_size
        try:
            list(rule.pieces(name, 0, size))
        except ValueError as error:
            misfits.setdefault("tensor_model" if expert is None else "expert_tensor", []).append(str(error))
            continue
        rank = stage_of(name, stages_of_layers) * parallel.stage_size
        if expert is not None and experts % parallel.expert_model_parallel_size == 0:
            rank += expert * parallel.expert_model_parallel_size // experts * parallel.expert_tensor_parallel_size
        for key, first, shape in _tensors(at, rule):
            for shard, box in _cut(rule, shape, size):
                chunk = Box((*at.index, *box.start), (*(i + 1 for i in at.index), *box.stop))
                label, own = _label(key, chunk), box.shift((first, *(0 for _ in shape[1:])))
                pieces = [
                    Piece(p.tensor, common.shift(_offset(p)), label, common.shift(-s for s in own.start))
                    for p in rule.pieces(name, 0, 1)
                    if (common := p.local_box.intersect(own))
                ]
                result.append(Shard(rank + shard, at, key, chunk, (*at.axes, *shape), pieces))
    for kind, lines in misfits.items():
        size = f"{kind}_parallel_size"
        more = f" (and {len(lines) - 1} more parameters)" if len(lines) > 1 else ""
        faults.append(f"{size} = {getattr(parallel, size)}: {lines[0]}{more}; choose a divisor")
    return result, faults


def _rules(family: Architecture, hf: dict[str, Any], slices: int) -> dict[str, Rule]:
    rules = family.parameters(hf, slices)
    # A tied output layer is the embedding, and saved once.
    return {n: r for n, r in rules.items() if n != OUTPUT_LAYER or not hf.get("tie_word_embeddings", False)}


def _layers(rules: Iterable[str]) -> int:
    return (1 + max(int(m[1]) for name in rules if (m := re.match(r"decoder\.layers\.(\d+)\.", name)))) // 2


def _wrong_naming(family: Architecture, hf: dict[str, Any], naming: str) -> str | None:
    pattern = family.layer_pattern(hf, 1)
    if naming == "gpt" and not re.fullmatch(r"(\*-)+|(\*E)+", pattern):
        return (
            f"naming = gpt: every layer of a GPTModel is attention and MLP, those of this {hf['model_type']} are "
            f"{pattern}; use hybrid, the names of HybridModel"
        )
    return None


def _shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Shape of the global tensor."""
    return tuple(map(max, zip(*(piece.local_box.stop for piece in pieces), strict=True)))


def _parts(rule: Rule) -> tuple[int, ...]:
    """Rows of each part that may be stored as a tensor of its own."""
    match rule:
        case Stacked(tensors=tensors, shape=shape):
            return (shape[0],) * len(tensors)
        case Blocks(sizes=sizes):
            return sizes
    return ()


def _tensors(at: Place, rule: Rule) -> list[tuple[str, int, tuple[int, ...]]]:
    """Key, first row in the parameter, and shape of each tensor in which a parameter is stored."""
    if isinstance(rule, Vocabulary):
        return [(at.key, 0, (padded_vocab_size(rule.shape[0], rule.multiple, rule.block), *rule.shape[1:]))]
    rows, *rest = _shape(list(rule.pieces("", 0, 1)))
    sizes = _parts(rule) if at.blocks else (rows,)
    firsts = accumulate(sizes[:-1], initial=0)
    return [(key, first, (n, *rest)) for key, first, n in zip(at.keys, firsts, sizes, strict=True)]


def _fits(found: tuple[int, ...], wanted: tuple[int, ...], padded: bool) -> bool:
    return found == wanted or (padded and found[1:] == wanted[1:] and found[:1] >= wanted[:1])


def _offset(piece: Piece) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(piece.box.start, piece.local_box.start, strict=True))


def _cut(rule: Rule, shape: tuple[int, ...], size: int) -> Iterator[tuple[int, Box]]:
    """Shard number and box of every chunk: a gated linear layer's halves are cut, and saved, one by one."""
    match rule:
        case Split(dim=dim):
            parts = 1
        case Stacked(tensors=tensors):
            dim, parts = 0, len(tensors)
        case GroupedQKV() | Vocabulary() | Blocks():
            dim, parts = 0, 1
        case _:
            raise TypeError(f"no chunks are known for {type(rule).__name__}")
    if dim is None:
        yield 0, Box.whole(shape)
        return
    step = shape[dim] // (size * parts)
    for i in range(size * parts):
        start, stop = [0] * len(shape), list(shape)
        start[dim], stop[dim] = i * step, (i + 1) * step
        yield i % size, Box(tuple(start), tuple(stop))
