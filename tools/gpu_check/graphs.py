"""Bits of steps recorded in a CUDA graph and replayed with other numbers, against calls of the same and packed rows.

Without a GPU a call is made where the graph would be replayed: that checks everything but the graph.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.kernels.attention import paged_attention
from megatron_rlzero.kernels.attention.triton import device_plan
from megatron_rlzero.kernels.backend import INTERPRETED
from megatron_rlzero.kernels.conv1d import causal_conv1d_cached
from megatron_rlzero.kernels.experts import combine, mlp
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.log_prob import log_softmax
from megatron_rlzero.kernels.mamba import Cache, scan_cached_at
from megatron_rlzero.kernels.norm import rms_norm
from megatron_rlzero.kernels.router import gate, top_k
from tools.gpu_check.measures import Comparison, poisoned
from tools.gpu_check.schedules import conv_state, new_rows, pages, places, scan_state
from tools.gpu_check.sequences import LIMIT, Packed, packed
from tools.gpu_check.sizes import DEVICE, SIZES, randn

S = SIZES
#: new tokens of the sequences in a step, taken in turn: some pause
NEW, STEPS = (1, 1, 0, 1, 2), 5
#: rows of a step that belong to no sequence
SPARE = 3

Numbers = dict[str, Tensor]
#: a step: numbers, and memory that it reads and writes
Step = Callable[[Numbers, Sequence[Tensor]], Tensor]


class Recorded:
    """``call``, recorded once, after it has run on a side stream; what it reads may change from replay to replay."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        if INTERPRETED:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and makes what a library makes once
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._out = call()

    def replay(self) -> Tensor:
        if INTERPRETED:
            return self._call()
        self._graph.replay()
        return self._out.clone()  # the next replay writes there again


def check(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """``name``: attention | conv1d | mamba, or experts, with all else that a layer has without a cache."""
    with poisoned():
        return _layer(dtype) if name == "experts" else _decoding(name, dtype)


def _decoding(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A prefill, then a step that is recorded, and replayed where sequences pause and rows belong to nobody."""
    case = packed(name, dtype)
    lengths, count = list(case.lengths), len(case.lengths)
    wanted = case.call(*case.inputs, lengths).split(lengths)
    table, tokens = pages(lengths, dtype)[0], count * max(NEW) + SPARE
    memory, step = DECODERS[name](case, table)
    done = [max(n - STEPS * max(NEW), 0) for n in lengths]
    step(_numbers(case, table, [0] * count, done, sum(done) + SPARE), memory)
    other, buffers = [t.clone() for t in memory], _numbers(case, table, done, [0] * count, tokens)
    recorded = Recorded(lambda: step(buffers, other))
    compare, stale = Comparison(), Comparison()
    for turn in range(STEPS):
        new = [min(NEW[(turn + i) % len(NEW)], n - d) for i, (n, d) in enumerate(zip(lengths, done, strict=True))]
        numbers = _numbers(case, table, done, new, tokens)
        before = recorded.replay()  # with the numbers of the step before
        _copy(memory, other)
        _copy(numbers.values(), buffers.values())
        replayed, called = recorded.replay(), step(numbers, memory)
        stale("numbers of the step before", before, called)
        compare(f"step {turn}, all rows", replayed, called)
        for i, part in enumerate(replayed[: sum(new)].split(new)):
            compare(f"step {turn}, sequence {i}", part, wanted[i][done[i] : done[i] + new[i]])
        for i, (a, b) in enumerate(zip(other, memory, strict=True)):
            compare(f"step {turn}, memory {i}", a, b.clone())
        done = [n + more for n, more in zip(done, new, strict=True)]
    return [compare.result("recorded steps", stale.differing)]


def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


def _numbers(case: Packed, table: Tensor, done: list[int], new: list[int], tokens: int) -> Numbers:
    """What a step is called with: counts, and inputs of ``tokens`` rows, those behind the new ones full of NaN."""
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    positions = torch.tensor(done, dtype=torch.int32)
    counts = {"starts": starts, "positions": positions, "ends": positions + starts.diff()}
    numbers = {key: value.to(DEVICE) for key, value in counts.items()}
    numbers["slots"] = torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE)
    numbers["slots"][: sum(new)] = places(table, done, new)
    for i, rows in enumerate(new_rows(case, done, new)):
        if i in case.tokens:
            padded = torch.full((tokens, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=DEVICE)
            padded[: len(rows)] = rows
            numbers[f"input {i}"] = padded
    return numbers


def _inputs(case: Packed, numbers: Numbers) -> list[Tensor]:
    return [numbers.get(f"input {i}", x) for i, x in enumerate(case.inputs)]


def _attend(case: Packed, table: Tensor) -> tuple[list[Tensor], Step]:
    def step(numbers: Numbers, memory: Sequence[Tensor]) -> Tensor:
        q, k, v = _inputs(case, numbers)
        counts = numbers["slots"], numbers["starts"], numbers["ends"]
        return paged_attention(
            q, k, v, *memory, device_plan(table, *counts, len(q), S.heads // S.kv_heads), S.dim**-0.5
        )

    return [pages(case.lengths, case.inputs[0].dtype)[1]], step


def _convolve(case: Packed, table: Tensor) -> tuple[list[Tensor], Step]:
    state, slots = conv_state(len(case.lengths), case.inputs[0].dtype)

    def step(numbers: Numbers, memory: Sequence[Tensor]) -> Tensor:
        counts = numbers["starts"], numbers["positions"]
        return causal_conv1d_cached(*_inputs(case, numbers), *counts, *memory, slots)

    return [state], step


def _scan(case: Packed, table: Tensor) -> tuple[list[Tensor], Step]:
    *memory, slots = scan_state(len(case.lengths), case.inputs[0].dtype)

    def step(numbers: Numbers, memory: Sequence[Tensor]) -> Tensor:
        counts = numbers["starts"], numbers["positions"]
        return scan_cached_at(*_inputs(case, numbers), *counts, Cache(*memory, slots), LIMIT)

    return memory, step


DECODERS: dict[str, Callable[[Packed, Tensor], tuple[list[Tensor], Step]]] = {
    "attention": _attend, "conv1d": _convolve, "mamba": _scan,
}  # fmt: skip


def _layer(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Norm, linear, router, experts, their sum, head and log-softmax of few rows: replayed, called, and in a batch."""
    shapes = ((S.hidden,), (S.hidden, S.hidden), (S.experts, S.hidden), (2048, S.hidden))
    norm, weight, router, head = (randn(*shape, dtype=dtype, scale=S.hidden**-0.5) for shape in shapes)
    shapes = ((S.experts, 2 * S.width, S.hidden), (S.experts, S.hidden, S.width))
    experts = [randn(*shape, dtype=dtype, scale=shape[2] ** -0.5) for shape in shapes]

    def layer(x: Tensor) -> Tensor:
        x = linear(rms_norm(x, norm, 1e-6), weight)
        probabilities, chosen = top_k(gate(x, router), S.top, renormalise=True)
        x = combine(mlp(x, chosen, *experts), probabilities)
        return torch.cat((x.float(), log_softmax(linear(x, head))), 1)

    few, batch = 9, randn(S.rows, S.hidden, dtype=dtype)
    buffer, wanted = batch[:few].clone(), layer(batch)
    recorded, compare, stale = Recorded(lambda: layer(buffer)), Comparison(), Comparison()
    for first in range(1, S.rows - few, max(S.rows // 8, few)):
        rows = slice(first, first + few)
        stale("the rows before", recorded.replay(), wanted[rows])
        buffer.copy_(batch[rows])
        replayed = recorded.replay()
        compare(f"rows from {first} on, called", replayed, layer(batch[rows].clone()))
        compare(f"rows from {first} on, in the batch", replayed, wanted[rows])
    return [compare.result("recorded layers", stale.differing)]
