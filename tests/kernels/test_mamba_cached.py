"""Mamba-2 scan with a cache, every form: the bits of the packed scan under every schedule, whatever a cache holds."""

import random

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import Cache, buffers, scan, scan_cached, scan_cached_at
from megatron_rlzero.kernels.segments import bounds_of
from tests.kernels.checks import DTYPES, FP32, INTERPRETED
from tests.kernels.test_mamba import CASES, LIMIT, SIZES, Q, bind, make
from tests.kernels.test_mamba import LENGTHS as PACKED

pytestmark = pytest.mark.usefixtures("form")

LENGTHS = [1, 2 * Q + 3, Q] if INTERPRETED else PACKED


@pytest.fixture(autouse=True)
def fresh_buffers():
    """So that they hold NaN, as all memory that nothing was written to."""
    buffers._buffers.cache_clear()


def empty(blocks, sizes, dtype, rubbish=torch.nan):
    H, P, G, N = sizes
    shapes = (((H, P, N), FP32), ((Q, H, P), dtype), ((Q, H), FP32), ((Q, G, N), dtype))
    # Two blocks in one page: a block's successor does not follow it.
    return Cache(
        *(torch.full((blocks, 2, *shape), rubbish, dtype=kind)[:, 0] for shape, kind in shapes), torch.empty(0)
    )


def run(inputs, lengths, schedule, rubbish=torch.nan):
    """``schedule``: for each step, new tokens of each sequence; what a sequence left unused is spoiled in between."""
    x, dt, A, B, C, D, bias = inputs
    sizes = (*x.shape[1:], *B.shape[1:])
    cache = empty(len(lengths) + 3, sizes, x.dtype, rubbish)
    slots = torch.randperm(len(lengths) + 3)[: len(lengths)]
    parts = [t.split(lengths) for t in (x, dt, B, C)]
    done, out = [0] * len(lengths), [[] for _ in lengths]
    for step in schedule:
        active = [i for i, new in enumerate(step) if new]
        new, starts = [step[i] for i in active], [done[i] for i in active]
        mine = [torch.cat([t[i][done[i] : done[i] + step[i]] for i in active]) for t in parts]
        now = cache._replace(slots=slots[active])
        y = scan_cached(*mine[:2], A, *mine[2:], D, bias, new, starts, now, LIMIT)
        for i, rows in zip(active, y.split(new), strict=True):
            out[i].append(rows)
            done[i] += step[i]
            for t in cache[1:4]:
                t[slots[i], done[i] % Q :] = rubbish
            if done[i] < Q:
                cache.state[slots[i]] = rubbish
    assert done == lengths
    return torch.cat([torch.cat(rows) for rows in out])


def schedules(lengths):
    yield "prefill", [lengths]
    if not INTERPRETED:
        yield "alone", [[n if i == j else 0 for j in range(len(lengths))] for i, n in enumerate(lengths)]
    yield "37 tokens", [[min(37, max(n - 37 * s, 0)) for n in lengths] for s in range(-(-max(lengths) // 37))]
    whole = [max(n - 3, 0) if INTERPRETED else 0 for n in lengths]
    steps = [[int(s < n - w) for n, w in zip(lengths, whole, strict=True)] for s in range(max(lengths))]
    yield "token by token", [step for step in (whole, *steps) if any(step)]
    draw, left, steps = random.Random(0), list(lengths), []
    while any(left):
        step = [min(n, draw.choice([0, 1, 1, 1, 2, 5, 31, 32, 70])) for n in left]
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    yield "mixed", steps


@pytest.mark.parametrize(("dtype", "sizes"), CASES)
def test_every_schedule_gives_the_bits_of_the_packed_scan(dtype, sizes):
    inputs = make(sum(LENGTHS), sizes, dtype)
    wanted = bind(scan, LENGTHS)(*inputs)
    for name, schedule in schedules(LENGTHS):
        assert torch.equal(run(inputs, LENGTHS, schedule), wanted), name
    other = run([inputs[0] * 1.01, *inputs[1:]], LENGTHS, [LENGTHS])
    assert not torch.equal(other, wanted)


def test_what_lies_in_the_cache_has_no_influence():
    inputs = make(sum(LENGTHS), SIZES[0])
    steps = dict(schedules(LENGTHS))["mixed"]
    results = [run(inputs, LENGTHS, steps, rubbish) for rubbish in (torch.nan, torch.inf, 1e30, 0.0)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert bool(results[0].isfinite().all())


def test_what_belongs_to_the_sequence_has_influence():
    inputs, sizes = make(Q + 3, SIZES[0]), SIZES[0]
    x, dt, A, B, C, D, bias = inputs
    for spoiled in range(4):
        cache = empty(1, sizes, FP32)._replace(slots=torch.tensor([0]))
        n = Q + 2
        scan_cached(x[:n], dt[:n], A, B[:n], C[:n], D, bias, [n], [0], cache, LIMIT)
        clean = [t.clone() for t in cache]
        y = scan_cached(x[n:], dt[n:], A, B[n:], C[n:], D, bias, [1], [n], cache, LIMIT)
        assert torch.equal(y, bind(scan, [Q + 3])(*inputs)[n:])
        clean[spoiled].view(-1)[0] += 1
        other = scan_cached(x[n:], dt[n:], A, B[n:], C[n:], D, bias, [1], [n], Cache(*clean), LIMIT)
        assert not torch.equal(other, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_on_the_device_and_sequences_without_new_tokens(dtype):
    """The bits of counts in lists; what has no tokens leaves its block alone, whatever its slot and position."""
    inputs, sizes = make(Q + 9, SIZES[-1], dtype), SIZES[-1]
    past, lengths, positions = Q - 2, [0, 5, 0, 1, 0], [7, Q - 2, Q + 9, 0, 0]
    x, dt, A, B, C, D, bias = inputs
    caches = [empty(6, sizes, dtype, 7.0) for _ in range(2)]
    for cache in caches:
        old = cache._replace(slots=torch.tensor([4]))
        scan_cached(x[:past], dt[:past], A, B[:past], C[:past], D, bias, [past], [0], old, LIMIT)
    new = [t[past:] for t in (x, dt, B, C)]
    here = [t[:6] for t in new]
    cache = caches[0]._replace(slots=torch.tensor([4, 0]))
    wanted = scan_cached(*here[:2], A, *here[2:], D, bias, [5, 1], [past, 0], cache, LIMIT)
    # more rows than tokens, as where a step is padded to the size of a recorded one
    cache = caches[1]._replace(slots=torch.tensor([-1, 4, 2, 0, 2**40]))
    counts = bounds_of(lengths, x.device), torch.tensor(positions, dtype=torch.int32)
    found = scan_cached_at(*new[:2], A, *new[2:], D, bias, *counts, cache, LIMIT)
    assert torch.equal(found[:6], wanted)
    assert not bool(found[6:].any())
    assert all(map(torch.equal, caches[0][:4], caches[1][:4]))
    assert all(bool((t[[1, 2, 3, 5]] == 7).all()) for t in caches[1][:4])
    assert not bool((caches[1].state[4] == 7).any())
    counts = counts[0], torch.tensor([7, past + 1, Q + 9, 0, 0], dtype=torch.int32)
    assert not torch.equal(scan_cached_at(*new[:2], A, *new[2:], D, bias, *counts, cache, LIMIT)[:6], wanted)


@pytest.mark.cpu
def test_threads_change_no_bit():
    inputs = make(sum(LENGTHS), (8, 64, 2, 128))
    torch.set_num_threads(1)
    steps = dict(schedules(LENGTHS))["mixed"]
    wanted = run(inputs, LENGTHS, steps)
    torch.set_num_threads(2)
    assert torch.equal(run(inputs, LENGTHS, steps), wanted)


@pytest.mark.cpu
@pytest.mark.parametrize("form", ["torch"], indirect=True)
def test_few_rows_alone_are_not_the_same(monkeypatch):
    """With one row per product, as a step would be without tiles, the library takes other code."""
    inputs = make(sum(LENGTHS), (8, 64, 2, 128))
    wanted = bind(scan, LENGTHS)(*inputs)
    monkeypatch.setattr(tiles, "MAMBA_ROWS", 1)
    found = run(inputs, LENGTHS, dict(schedules(LENGTHS))["token by token"])
    assert not torch.equal(found, wanted)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_counts_that_do_not_fit_are_refused():
    inputs, cache = make(2, SIZES[0]), empty(3, SIZES[0], FP32)._replace(slots=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="2 lengths, 1 starts and 2 slots"):
        scan_cached(*inputs, [1, 1], [0], cache)
    counts = bounds_of([1, 1], cache.state.device), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 bounds, 1 positions and 2 slots"):
        scan_cached_at(*inputs, *counts, cache)
