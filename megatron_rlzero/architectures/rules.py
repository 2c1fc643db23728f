"""How one Megatron parameter is made of Hugging Face tensors: a rule per kind, pure arithmetic on shapes.

Every rule answers one question: which boxes of which tensors lie where in the shard of tensor-parallel rank r of n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron_rlzero.resharding.layout import Box, Piece


class Rule(Protocol):
    """The content of one parameter."""

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        """Pieces of shard ``rank`` of ``size`` in the local tensor ``local``; they never overlap."""
        ...


@dataclass(frozen=True)
class Split:
    """One tensor, cut evenly along ``dim``, or whole on every rank where ``dim`` is None."""

    tensor: str
    shape: tuple[int, ...]
    dim: int | None = None

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        box = Box.whole(self.shape)
        if self.dim is not None:
            step = _divide(self.shape[self.dim], size, self.tensor)
            box = _rows(self.shape, self.dim, rank * step, (rank + 1) * step)
        yield Piece(self.tensor, box, local, Box.whole(box.shape))


@dataclass(frozen=True)
class Stacked:
    """Tensors cut evenly along dimension 0, each rank's parts one under the other: [gate_r; up_r]."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        step = _divide(self.shape[0], size, self.tensors[0])
        for i, tensor in enumerate(self.tensors):
            box = _rows(self.shape, 0, rank * step, (rank + 1) * step)
            yield Piece(tensor, box, local, _rows((0, *self.shape[1:]), 0, i * step, (i + 1) * step))


@dataclass(frozen=True)
class Blocks:
    """One tensor of blocks one under the other, each cut evenly along dimension 0: Mamba's [z; x; B; C; dt]."""

    tensor: str
    sizes: tuple[int, ...]
    """Rows of each block of the whole tensor."""
    rest: tuple[int, ...]
    """Dimensions after the first."""
    units: tuple[tuple[str, int], ...] = ()
    """What no rank has a part of, by the setting that counts it: heads, and groups of heads."""

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        for setting, count in self.units:
            _divide(count, size, self.tensor, f"{setting} = ")
        shape, first, at = (sum(self.sizes), *self.rest), 0, 0
        for rows in self.sizes:
            step = _divide(rows, size, self.tensor)
            start = first + rank * step
            box = _rows(shape, 0, start, start + step)
            yield Piece(self.tensor, box, local, _rows(shape, 0, at, at + step))
            first, at = first + rows, at + step


@dataclass(frozen=True)
class NegativeExp(Split):
    """-exp of a tensor: vLLM keeps A, checkpoints its logarithm."""

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        for piece in super().pieces(local, rank, size):
            yield piece._replace(transform="negative_exp")


@dataclass(frozen=True)
class GroupedQKV:
    """Query, key and value projections interleaved by KV group: [q heads of group 0, k 0, v 0, q heads of group 1, ..].

    Tensor parallelism takes contiguous groups.
    """

    query: str
    key: str
    value: str
    heads: int
    groups: int
    head_dim: int
    rest: tuple[int, ...]
    """Dimensions after the first: (hidden,) for weights, () for biases."""

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        per_rank = _divide(self.groups, size, self.key)
        d, queries = self.head_dim, self.heads // self.groups
        at = 0
        for group in range(rank * per_rank, (rank + 1) * per_rank):
            for tensor, heads in ((self.query, queries), (self.key, 1), (self.value, 1)):
                rows = heads * d
                source = _rows((0, *self.rest), 0, group * rows, (group + 1) * rows)
                yield Piece(tensor, source, local, _rows((0, *self.rest), 0, at, at + rows))
                at += rows


@dataclass(frozen=True)
class QKV(GroupedQKV):
    """Query, key and value projections one under the other: [q heads of this rank, its k heads, its v heads].

    Of fewer KV heads than ranks, neighbouring ranks hold the same.
    """

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        at = 0
        for tensor, heads in ((self.query, self.heads), (self.key, self.groups), (self.value, self.groups)):
            shards = min(size, heads)
            rows = _divide(heads, shards, tensor) * self.head_dim
            first = rank * shards // size * rows
            source = _rows((0, *self.rest), 0, first, first + rows)
            yield Piece(tensor, source, local, _rows((0, *self.rest), 0, at, at + rows))
            at += rows


@dataclass(frozen=True)
class Vocabulary:
    """Rows of an embedding or output layer, padded to whole blocks on every rank; padding comes from no tensor."""

    tensor: str
    shape: tuple[int, ...]
    multiple: int
    block: int = 128

    def pieces(self, local: str, rank: int, size: int) -> Iterator[Piece]:
        step = _divide(padded_vocab_size(self.shape[0], self.multiple, self.block), size, self.tensor)
        start, stop = min(rank * step, self.shape[0]), min((rank + 1) * step, self.shape[0])
        if start < stop:
            yield Piece(self.tensor, _rows(self.shape, 0, start, stop), local, _rows(self.shape, 0, 0, stop - start))


def padded_vocab_size(vocab_size: int, multiple: int, block: int = 128) -> int:
    """Rows of an embedding of ``vocab_size``: blocks of ids, the same number in each of ``multiple`` slices.

    It does not depend on the tensor-parallel size, which divides the number of slices.
    """
    return -(-vocab_size // (block * multiple)) * block * multiple


def _divide(n: int, size: int, tensor: str, name: str = "") -> int:
    if n % size:
        raise ValueError(f"{tensor}: {name}{n} does not divide by a tensor-parallel size of {size}")
    return n // size


def _rows(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    low, high = [0] * len(shape), list(shape)
    low[dim], high[dim] = start, stop
    return Box(tuple(low), tuple(high))
