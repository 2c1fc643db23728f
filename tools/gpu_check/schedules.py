"""Bits of prefill, chunks of it and decoding with a cache, against packed documents, under several schedules."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softplus

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import paged_attention, plan
from megatron_rlzero.kernels.conv1d import causal_conv1d_cached
from megatron_rlzero.kernels.mamba import Cache, scan, scan_cached
from megatron_rlzero.kernels.segments import bounds_of
from tools.gpu_check.measures import Comparison, poisoned, same
from tools.gpu_check.sequences import LIMIT, WIDTH, Packed, packed
from tools.gpu_check.sizes import DEVICE, FP32, SIZES

S = SIZES
#: Rows of the new tokens of sequences, given tokens that are done and new ones of each.
Step = Callable[[list[int], list[int]], Sequence[Tensor]]


def check(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """``name``: attention | conv1d | mamba; stale memory holds NaN."""
    with poisoned():
        case = packed(name, dtype)
        lengths, compare = list(case.lengths), Comparison()
        wanted = case.call(*case.inputs, lengths).split(lengths)
        for label, schedule in schedules(lengths):
            found = follow(schedule, STEPS[name](case))
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                compare(f"{label}, sequence {i} of {lengths[i]} tokens", a, b)
        checks = [compare.result("prefill, chunks and decoding", _control(name, case, wanted))]
        return [*checks, _library(case).beside("a last row alone, F.sdpa")] if name == "attention" else checks


def schedules(lengths: list[int]) -> Iterator[tuple[str, list[list[int]]]]:
    """For each step the new tokens of each sequence."""
    yield "prefill", [lengths]
    yield "alone", [[n if i == j else 0 for j in range(len(lengths))] for i, n in enumerate(lengths)]
    cuts = range(0, max(lengths), S.chunk)
    yield f"chunks of {S.chunk}", [[min(S.chunk, max(n - cut, 0)) for n in lengths] for cut in cuts]
    whole = [max(n - S.tail, 0) for n in lengths]
    decoded = [[int(step < n - w) for n, w in zip(lengths, whole, strict=True)] for step in range(S.tail)]
    yield "decoding", [whole, *decoded]
    draw, left, steps = random.Random(0), list(lengths), []
    while any(left):
        step = [min(n, draw.choice([0, 1, 1, 1, 2, 5, 31, 32, 130, 300])) for n in left]
        steps += [step] if any(step) else []
        left = [n - new for n, new in zip(left, step, strict=True)]
    yield "mixed", steps


def follow(schedule: list[list[int]], step: Step) -> list[Tensor]:
    """Rows of every sequence."""
    done = [0] * len(schedule[0])
    rows: list[list[Tensor]] = [[] for _ in done]
    for new in schedule:
        for mine, part in zip(rows, step(done, new), strict=True):
            mine.append(part)
        done = [n + more for n, more in zip(done, new, strict=True)]
    return [torch.cat(mine) for mine in rows]


def new_rows(case: Packed, done: list[int], new: list[int]) -> list[Tensor]:
    """The inputs of a step: of those that belong to tokens the new ones."""
    first = [sum(case.lengths[:i]) + n for i, n in enumerate(done)]
    rows = torch.cat([torch.arange(a, a + n, device=DEVICE) for a, n in zip(first, new, strict=True)])
    return [x[rows] if i in case.tokens else x for i, x in enumerate(case.inputs)]


def pages(lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A block table int32 [sequences, blocks] of pages that lie anywhere, and the cache, which holds NaN."""
    blocks = -(-max(lengths) // tiles.KEYS)
    table = torch.randperm(len(lengths) * blocks + 3)[: len(lengths) * blocks].view(len(lengths), blocks)
    cache = torch.full((table.numel() + 3, S.kv_heads, 2, tiles.KEYS, S.dim), torch.nan, dtype=dtype, device=DEVICE)
    return table.int().to(DEVICE), cache


def places(table: Tensor, done: list[int], new: list[int]) -> Tensor:
    """int64 [tokens]: where the new tokens' keys and values go."""
    parts = []
    for row, start, count in zip(table.long(), done, new, strict=True):
        at = torch.arange(start, start + count, device=DEVICE)
        parts.append(row[at // tiles.KEYS] * tiles.KEYS + at % tiles.KEYS)
    return torch.cat(parts)


def _attend(case: Packed) -> Step:
    table, cache = pages(case.lengths, case.inputs[0].dtype)

    def step(done: list[int], new: list[int]) -> Sequence[Tensor]:
        ends = [n + more for n, more in zip(done, new, strict=True)]
        layers = plan(table, places(table, done, new), new, ends, S.heads, S.kv_heads, S.dim)
        return paged_attention(*new_rows(case, done, new), cache, layers, S.dim**-0.5).split(new)

    return step


def conv_state(sequences: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks that hold NaN, with other things beside them in a page, and those of the sequences."""
    memory = torch.full((sequences + 3, WIDTH + 1, S.channels + 8), torch.nan, dtype=dtype, device=DEVICE)
    return memory[:, 1:WIDTH, : S.channels], torch.randperm(sequences + 3)[:sequences].to(DEVICE)


def _convolve(case: Packed) -> Step:
    state, slots = conv_state(len(case.lengths), case.inputs[0].dtype)

    def step(done: list[int], new: list[int]) -> Sequence[Tensor]:
        counts = bounds_of(new, DEVICE), torch.tensor(done, dtype=torch.int32, device=DEVICE)
        return causal_conv1d_cached(*new_rows(case, done, new), *counts, state, slots).split(new)

    return step


def scan_state(sequences: int, dtype: torch.dtype) -> Cache:
    """Blocks that hold NaN, every other one of its memory."""
    (H, P, G, N), c = S.scan, tiles.CHUNK
    shapes = (((H, P, N), FP32), ((c, H, P), dtype), ((c, H), FP32), ((c, G, N), dtype))
    blocks = [
        torch.full((sequences + 3, 2, *shape), torch.nan, dtype=kind, device=DEVICE)[:, 0] for shape, kind in shapes
    ]
    return Cache(*blocks, torch.randperm(sequences + 3)[:sequences].to(DEVICE))


def _scan(case: Packed) -> Step:
    cache = scan_state(len(case.lengths), case.inputs[0].dtype)

    def step(done: list[int], new: list[int]) -> Sequence[Tensor]:
        active = [i for i, n in enumerate(new) if n]
        now = cache._replace(slots=cache.slots[active])
        starts, counts = ([numbers[i] for i in active] for numbers in (done, new))
        return scan_cached(*new_rows(case, done, new), counts, starts, now, LIMIT).split(new)

    return step


STEPS: dict[str, Callable[[Packed], Step]] = {"attention": _attend, "conv1d": _convolve, "mamba": _scan}


def _control(name: str, case: Packed, wanted: Sequence[Tensor]) -> int:
    """In how many sequences a known fault, or another order of the sums, is noticed."""
    lengths, last = list(case.lengths), len(case.lengths) - 1
    if name == "attention":  # other ranges of keys
        found = _with_other_ranges(lambda: case.call(*case.inputs, lengths)).split(lengths)
        return sum(not same(a, b) for a, b in zip(found, wanted, strict=True))
    if name == "conv1d":  # a sequence that forgets its past
        x, weight, bias = case.inputs
        found = case.call(x.split(lengths)[last][1:], weight, bias, [lengths[last] - 1])
        return int(not same(found, wanted[last][1:]))
    # chunks that begin elsewhere, after a token whose state is known, or, as in another place, is forgotten
    x, dt, A, B, C, D, bias = (t.split(lengths)[last] if i in case.tokens else t for i, t in enumerate(case.inputs))
    step = softplus(dt[0].float() + bias).clamp(*LIMIT)
    first = B[0].float().repeat_interleave(S.scan[0] // S.scan[2], 0)
    state = (step[:, None] * x[0].float())[..., None] * first[:, None]
    rest = (x[1:], dt[1:], A, B[1:], C[1:], D, bias, [lengths[last] - 1], LIMIT)
    return sum(not same(scan(*rest, initial), wanted[last][1:]) for initial in (state[None], None))


def _library(case: Packed) -> Comparison:
    """The last row of each document by torch's own attention, alone and among the others."""
    compare = Comparison()
    for document in zip(*(x.split(list(case.lengths)) for x in case.inputs), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        last = scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
        compare(f"{q.shape[2]} tokens", last, whole[:, :, -1:])
    return compare


def _with_other_ranges(call: Callable[[], Tensor]) -> Tensor:
    known = tiles.gpu(DEVICE)
    halved = {n: replace(t, split=t.split // 2) for n in ("attention", "attention_fp32") for t in [getattr(known, n)]}
    whole = tiles.gpu
    tiles.gpu = lambda device: replace(known, **halved)
    try:
        return call()
    finally:
        tiles.gpu = whole
