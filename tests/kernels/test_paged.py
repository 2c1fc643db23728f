"""Paged attention: the bits of packed attention under every schedule, and of nothing but the sequence itself."""

import random

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import attention, paged_attention, plan
from tests.kernels.checks import DTYPES, FP32

pytestmark = pytest.mark.usefixtures("form")

HEADS, KV_HEADS, DIM = 4, 2, 32
LENGTHS = [1, 5, 127, 128, 129, 300, 17, 700, 40, 260]


def make(lengths, dtype, heads=HEADS, kv_heads=KV_HEADS, dim=DIM):
    n = sum(lengths)
    return tuple((torch.randn(n, h, dim) * 2).to(dtype) for h in (heads, kv_heads, kv_heads))


def run(inputs, lengths, schedule, rubbish=torch.nan):
    """``schedule``: for each step, new tokens of each sequence; sequences without any are not in the step."""
    heads, kv_heads, dim = inputs[0].shape[1], *inputs[1].shape[1:]
    blocks = [-(-n // tiles.KEYS) for n in lengths]
    order = torch.randperm(sum(blocks) + 3)
    tables = order[: sum(blocks)].split(blocks)
    cache = torch.full((len(order), kv_heads, 2, tiles.KEYS, dim), rubbish, dtype=inputs[0].dtype)
    q, k, v = (x.split(lengths) for x in inputs)
    done, out = [0] * len(lengths), [[] for _ in lengths]
    for step in schedule:
        active = [i for i, new in enumerate(step) if new]
        table = torch.zeros(len(active), max(blocks), dtype=torch.int32)
        for row, i in enumerate(active):
            table[row, : blocks[i]] = tables[i]
        parts = {i: slice(done[i], done[i] + step[i]) for i in active}
        positions = {i: torch.arange(done[i], done[i] + step[i]) for i in active}
        slots = [tables[i][at // tiles.KEYS] * tiles.KEYS + at % tiles.KEYS for i, at in positions.items()]
        new, ends = [step[i] for i in active], [done[i] + step[i] for i in active]
        arguments = (torch.cat([x[i][parts[i]] for i in active]) for x in (q, k, v))
        layers = plan(table, torch.cat([*slots, torch.tensor([-1])]), new, ends, heads, kv_heads, dim)
        result = paged_attention(*arguments, cache, layers, dim**-0.5)
        for i, part in zip(active, result.split(new), strict=True):
            out[i].append(part)
            done[i] += step[i]
    assert done == lengths
    return torch.cat([torch.cat(parts) for parts in out])


def schedules(lengths):
    yield "prefill", [lengths]
    yield "alone", [[n if i == j else 0 for j in range(len(lengths))] for i, n in enumerate(lengths)]
    yield "37 rows", [[min(37, max(n - 37 * s, 0)) for n in lengths] for s in range(-(-max(lengths) // 37))]
    draw, left, steps = random.Random(0), list(lengths), []
    while any(left):
        step = [min(n, draw.choice([0, 1, 1, 1, 2, 5, 130, 300])) for n in left]
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    yield "mixed", steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 24), (3, 3, 64), (32, 2, 32)])
def test_every_schedule_gives_the_bits_of_packed_attention(dtype, heads, kv_heads, dim):
    inputs = make(LENGTHS, dtype, heads, kv_heads, dim)
    wanted = attention(*inputs, LENGTHS, dim**-0.5)
    for name, schedule in schedules(LENGTHS):
        assert torch.equal(run(inputs, LENGTHS, schedule), wanted), name
    other = run(tuple(x + 1e-3 for x in inputs), LENGTHS, [LENGTHS])
    assert not torch.equal(other, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token(dtype):
    lengths = [3, 140, 129, 20]
    inputs = make(lengths, dtype)
    steps = [[int(s < n) for n in lengths] for s in range(max(lengths))]
    assert torch.equal(run(inputs, lengths, steps), attention(*inputs, lengths, DIM**-0.5))


def test_what_lies_beyond_the_end_has_no_influence():
    inputs = make(LENGTHS, FP32)
    results = [run(inputs, LENGTHS, [LENGTHS], rubbish) for rubbish in (torch.nan, torch.inf, 1e30, 0.0)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert bool(results[0].isfinite().all())


def test_threads_and_gathering_change_no_bit(monkeypatch):
    inputs = make(LENGTHS, FP32)
    wanted = run(inputs, LENGTHS, [LENGTHS])
    torch.set_num_threads(2)
    monkeypatch.setattr("megatron_rlzero.kernels.attention.paged.GATHERED", 1)
    assert torch.equal(run(inputs, LENGTHS, [LENGTHS]), wanted)
    torch.set_num_threads(1)


def test_the_library_alone_is_not_the_same():
    """One row per product, as decoding would be without padding, has other bits."""
    inputs = make([300], FP32)
    wanted = attention(*inputs, [300], DIM**-0.5)[-1]
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in inputs)
    row = (q[:, -1:] @ k.transpose(1, 2) * DIM**-0.5).softmax(-1) @ v
    assert not torch.equal(row[:, 0], wanted)
    assert torch.allclose(row[:, 0], wanted, atol=1e-5)
