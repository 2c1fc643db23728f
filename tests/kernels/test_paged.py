"""Paged attention: the bits of packed attention under every schedule, and of nothing but the sequence itself."""

import random
from dataclasses import replace

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import attention, paged_attention, plan
from tests.kernels.checks import DTYPES, FP32, INTERPRETED

pytestmark = pytest.mark.usefixtures("form")
triton_only = pytest.mark.skipif(not INTERPRETED, reason="of the Triton form")

HEADS, KV_HEADS, DIM = 4, 2, 32
LENGTHS = [1, 5, 127, 128, 129, 300, 17, 700, 40, 260]
SHAPES = [(4, 2, 32), (8, 1, 24), (3, 3, 64), (32, 2, 32)]
#: Tokens of a step that cuts prefills.
CHUNK = 37
if INTERPRETED:
    LENGTHS, SHAPES, CHUNK = [1, 131, 40], [(6, 2, 24)], 70


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
    cut = range(0, max(lengths), CHUNK)
    yield f"{CHUNK} rows", [[min(CHUNK, max(n - start, 0)) for n in lengths] for start in cut]
    draw, left, steps = random.Random(0), list(lengths), []
    while any(left):
        step = [min(n, draw.choice([0, 1, 1, 1, 2, 5, 130, 300])) for n in left]
        if any(step):
            steps.append(step)
            left = [n - s for n, s in zip(left, step, strict=True)]
    yield "mixed", steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
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
    if INTERPRETED:  # only the last ones
        steps = [[2, 136, 126, 19], *([int(s < 1), 1, int(s < 3), int(s < 1)] for s in range(4))]
    assert torch.equal(run(inputs, lengths, steps), attention(*inputs, lengths, DIM**-0.5))


def test_what_lies_beyond_the_end_has_no_influence():
    inputs = make(LENGTHS, FP32)
    results = [run(inputs, LENGTHS, [LENGTHS], rubbish) for rubbish in (torch.nan, torch.inf, 1e30, 0.0)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert bool(results[0].isfinite().all())


@pytest.mark.cpu
def test_threads_and_gathering_change_no_bit(monkeypatch):
    inputs = make(LENGTHS, FP32)
    wanted = run(inputs, LENGTHS, [LENGTHS])
    torch.set_num_threads(2)
    monkeypatch.setattr("megatron_rlzero.kernels.attention.paged.GATHERED", 1)
    assert torch.equal(run(inputs, LENGTHS, [LENGTHS]), wanted)
    torch.set_num_threads(1)


@pytest.mark.cpu
def test_the_library_alone_is_not_the_same():
    """One row per product, as decoding would be without padding, has other bits."""
    inputs = make([300], FP32)
    wanted = attention(*inputs, [300], DIM**-0.5)[-1]
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in inputs)
    row = (q[:, -1:] @ k.transpose(1, 2) * DIM**-0.5).softmax(-1) @ v
    assert not torch.equal(row[:, 0], wanted)
    assert torch.allclose(row[:, 0], wanted, atol=1e-5)


@triton_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_of_keys_by_one_program_or_by_several(dtype, monkeypatch):
    """A prefill by programs that take the ranges in turn = decoding by one program per range, merged."""
    from megatron_rlzero.kernels.attention import triton

    lengths = [2 * tiles.SMALL.attention.split + 5]
    inputs, last = make(lengths, dtype, heads=2, kv_heads=1), [[lengths[0] - 2], [1], [1]]
    monkeypatch.setattr(triton, "PARTIAL", 0)
    wanted = attention(*inputs, lengths, DIM**-0.5)
    assert torch.equal(run(inputs, lengths, last), wanted)
    monkeypatch.setattr(triton, "PARTIAL", 2**30)
    assert torch.equal(attention(*inputs, lengths, DIM**-0.5), wanted)
    assert torch.equal(run(inputs, lengths, last), wanted)
    # another size of the ranges is another order of the sums
    small = replace(tiles.SMALL.attention, split=64)
    other = replace(tiles.SMALL, attention=small, attention_fp32=small)
    monkeypatch.setattr(tiles, "gpu", lambda device: other)
    changed = attention(*inputs, lengths, DIM**-0.5)
    assert not torch.equal(changed, wanted)
    assert torch.allclose(changed.float(), wanted.float(), rtol=0.02, atol=0.02)


@triton_only
def test_sequences_without_new_tokens_change_nothing():
    """What pads a CUDA graph: sequences of no tokens, tokens of no sequence; and sequences that pause."""
    from megatron_rlzero.kernels.attention import triton

    new, lengths = [3, 1], [140, 20]
    q, k, v = make(new, FP32)
    cache = torch.randn(5, KV_HEADS, 2, tiles.KEYS, DIM)
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    slots = torch.tensor([128 + 9, 128 + 10, 128 + 11, 4 * 128 + 19])
    caches = [cache.clone() for _ in range(3)]
    scale = DIM**-0.5
    wanted = paged_attention(q, k, v, caches[0], plan(table, slots, new, lengths, HEADS, KV_HEADS, DIM), scale)

    def padded(lengths):
        tables = torch.tensor([[7, 7], [3, 1], [2, 2], [4, 0], [9, 9], [9, 9]], dtype=torch.int32)
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 3, 3, 4, 4, 4], lengths))
        rest = torch.full((4,), -1)
        return triton.device_plan(tables, torch.cat((slots, rest)), starts, lengths, 7, HEADS // KV_HEADS)

    more = [torch.cat((x, torch.full((3, *x.shape[1:]), torch.nan))) for x in (q, k, v)]
    found = paged_attention(*more, caches[1], padded([0, 140, 200, 20, 0, 0]), scale)
    assert torch.equal(found[:4], wanted)
    assert not found[4:].any()
    assert torch.equal(caches[1], caches[0])
    # a sequence of another length would be noticed
    assert not torch.equal(paged_attention(*more, caches[2], padded([0, 139, 200, 20, 0, 0]), scale)[:4], wanted)
