"""Mamba-2 scan with a cache, both forms: the bits of the packed scan under every schedule, whatever a cache holds."""

import random

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import Cache, buffers, scan, scan_cached
from tests.kernels.checks import DTYPES, FP32
from tests.kernels.test_mamba import LENGTHS, LIMIT, SIZES, Q, bind, make

pytestmark = pytest.mark.usefixtures("form")


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
    yield "alone", [[n if i == j else 0 for j in range(len(lengths))] for i, n in enumerate(lengths)]
    yield "37 tokens", [[min(37, max(n - 37 * s, 0)) for n in lengths] for s in range(-(-max(lengths) // 37))]
    yield "token by token", [[int(s < n) for n in lengths] for s in range(max(lengths))]
    draw, left, steps = random.Random(0), list(lengths), []
    while any(left):
        step = [min(n, draw.choice([0, 1, 1, 1, 2, 5, 31, 32, 70])) for n in left]
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    yield "mixed", steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
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


def test_threads_change_no_bit():
    inputs = make(sum(LENGTHS), (8, 64, 2, 128))
    torch.set_num_threads(1)
    steps = dict(schedules(LENGTHS))["mixed"]
    wanted = run(inputs, LENGTHS, steps)
    torch.set_num_threads(2)
    assert torch.equal(run(inputs, LENGTHS, steps), wanted)


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
