"""Causal convolution: float64 values and gradients, and the bits of one call in any number of calls."""

import random

import pytest
import torch
from torch.nn import functional as F

from megatron_rlzero.kernels.conv1d import causal_conv1d, causal_conv1d_cached
from megatron_rlzero.kernels.conv1d.reference import conv_state
from megatron_rlzero.kernels.segments import bounds_of
from tests.kernels.checks import BF16, DTYPES, FP32, INTERPRETED, dependent_rows, error, errors, rounded_once, tolerance

LENGTHS = [[1], [5], [2, 2, 2], [1, 7, 1, 2, 3, 40], [33, 1, 12]]
CHANNELS = (1, 40, 67)
if INTERPRETED:
    LENGTHS, CHANNELS = LENGTHS[3:], (67,)
WIDTH = 4


def oracle(x, weight, bias, lengths, initial=None):
    """By torch's own convolution, one document after the other."""
    out = []
    for i, part in enumerate(x.split(lengths)):
        before = x.new_zeros(weight.shape[1] - 1, x.shape[1]) if initial is None else initial[i]
        rows = torch.cat((before, part)).T[None]
        out.append(F.conv1d(rows, weight[:, None], bias, groups=x.shape[1])[0].T)
    return F.silu(torch.cat(out))


def make(lengths, channels, dtype, width=WIDTH):
    shapes = ((sum(lengths), channels), (channels, width), (channels,), (len(lengths), width - 1, channels))
    return [torch.randn(*shape).to(dtype) for shape in shapes]


def bind(f, lengths):
    return lambda x, weight, bias, initial: f(x, weight, bias, lengths, initial)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_value_and_gradients(dtype, lengths):
    for channels in CHANNELS:
        inputs = make(lengths, channels, dtype)
        y = bind(causal_conv1d, lengths)(*inputs)
        assert y.dtype == dtype
        assert rounded_once(y, bind(oracle, lengths)(*(t.double() for t in inputs)))
        assert max(errors(bind(causal_conv1d, lengths), bind(oracle, lengths), inputs)) < tolerance(dtype)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_without_bias_and_past(width):
    x, weight, bias, _ = make([3, 9], 24, FP32, width)
    f, wanted = (lambda a, w, g=g: g(a, w, None, [3, 9]) for g in (causal_conv1d, oracle))
    assert max(errors(f, wanted, (x, weight))) < tolerance(FP32)
    assert error(causal_conv1d(x, weight, bias, [3, 9]), f(x, weight)) > 1e-3
    assert error(causal_conv1d(x, weight, None, [4, 8]), f(x, weight)) > 1e-3


def test_a_second_rounding_is_noticed():
    inputs = make([40], 64, BF16)
    x, weight, bias, initial = inputs
    total = bias.expand(x.shape)
    for k in range(WIDTH):
        total = total + torch.cat((initial[0], x))[k : k + 40] * weight[:, k]
    assert not rounded_once(F.silu(total), oracle(*(t.double() for t in inputs[:3]), [40], initial.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_cut_into_calls_gives_the_bits_of_one(dtype):
    lengths = [1, 13, 3, 20, 5] if INTERPRETED else [1, 40, 3, 64, 17]
    x, weight, bias, _ = make(lengths, 67, dtype)
    wanted, parts = causal_conv1d(x, weight, bias, lengths).split(lengths), x.split(lengths)
    for choice in ([1], [64], [0, 1, 1, 2, 5, 30]):
        draw, done, out = random.Random(0), [0] * 5, [[] for _ in lengths]
        state = torch.zeros(5, WIDTH - 1, 67, dtype=dtype)
        while done != lengths:
            new = [min(draw.choice(choice), n - d) for n, d in zip(lengths, done, strict=True)]
            active = [i for i in range(5) if new[i]]
            if not active:
                continue
            mine, counts = torch.cat([parts[i][done[i] : done[i] + new[i]] for i in active]), [new[i] for i in active]
            found = causal_conv1d(mine, weight, bias, counts, state[active]).split(counts)
            for i, y in zip(active, found, strict=True):
                out[i].append(y)
                done[i] += new[i]
            state[active] = conv_state(mine, counts, state[active])
        assert all(torch.equal(torch.cat(rows), w) for rows, w in zip(out, wanted, strict=True)), choice
    stale = causal_conv1d(parts[1][10:], weight, bias, [lengths[1] - 10], torch.zeros(1, WIDTH - 1, 67, dtype=dtype))
    assert not torch.equal(stale, wanted[1][10:])


@pytest.mark.parametrize(("dtype", "width", "biased"), [(FP32, WIDTH, True), (BF16, WIDTH, True), (BF16, 2, False)])
def test_a_cache_gives_the_bits_of_the_packed_form_under_every_schedule(dtype, width, biased):
    """Stale blocks hold NaN; every step has sequences without new tokens, whose slots may be any."""
    lengths, channels, past = [1, 9, 3, 34, 6] if INTERPRETED else [1, 40, 3, 64, 17], 40, width - 1
    x, weight, bias, _ = make(lengths, channels, dtype, width)
    bias = bias if biased else None
    wanted, parts = causal_conv1d(x, weight, bias, lengths), x.split(lengths)

    def step(state, slots, done, new):
        mine = torch.cat([parts[i][d : d + n] for i, (d, n) in enumerate(zip(done, new, strict=True))])
        positions = torch.tensor([*done, 3], dtype=torch.int32)
        slots = torch.where(torch.tensor(new) > 0, slots, 2**40)
        slots = torch.cat((slots, torch.tensor([-1])))
        bounds = bounds_of([*new, 0], x.device)
        # more rows than tokens, as where a step is padded to the size of a recorded one
        y = causal_conv1d_cached(torch.cat((mine, mine[:2])), weight, bias, bounds, positions, state, slots)
        assert not bool(y[len(mine) :].any())
        return y[: len(mine)].split(new)

    for choice in ([34], [0, 1, 1, 2, 5, 30]) if INTERPRETED else ([1], [64], [0, 1, 1, 2, 5, 30]):
        draw, done, out = random.Random(0), [0] * 5, [[] for _ in lengths]
        # two blocks in a page, in which other things lie too
        state, slots = (
            torch.full((8, 2, width + 2, 43), torch.nan, dtype=dtype)[:, 1, 1:width, :channels],
            torch.randperm(8)[:5],
        )
        while done != lengths:
            new = [min(draw.choice(choice), n - d) for n, d in zip(lengths, done, strict=True)]
            before = state.clone()
            for i, y in enumerate(step(state, slots, done, new) if any(new) else ()):
                out[i].append(y)
                done[i] += new[i]
            unchanged = [i for i in range(8) if i not in [s for s, n in zip(slots.tolist(), new, strict=True) if n]]
            assert torch.equal(state[unchanged].nan_to_num(7), before[unchanged].nan_to_num(7))
        assert torch.equal(torch.cat([row for rows in out for row in rows]), wanted), choice
        for i, part in enumerate(parts):
            last = torch.cat((part.new_zeros(past, channels), part))[-past:]
            assert torch.equal(state[slots[i]], last)
    # what a block holds counts from a sequence's second token on
    found = [step(torch.zeros_like(state), slots, [0, position, 0, 0, 0], [0, 1, 0, 0, 0])[1] for position in (0, 5)]
    rows = wanted.split(lengths)[1]
    assert torch.equal(found[0], rows[:1])
    assert not torch.equal(found[1], rows[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_and_documents_do_not_depend_on_each_other(dtype):
    lengths = [7, 1, 30]
    inputs = make(lengths, 64, dtype)
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = bind(causal_conv1d, lengths)(*leaves)
    cotangent = torch.randn(y.shape).to(dtype)
    grads = torch.autograd.grad(y, leaves, cotangent)
    x, weight, bias, initial = inputs
    half = [t.clone().requires_grad_() for t in (x[:, :32], weight[:32], bias[:32], initial[..., :32])]
    found = bind(causal_conv1d, lengths)(*half)
    assert torch.equal(found, y[:, :32])
    found = torch.autograd.grad(found, half, cotangent[:, :32])
    wanted = (grads[0][:, :32], grads[1][:32], grads[2][:32], grads[3][..., :32])
    assert all(map(torch.equal, found, wanted))
    alone = [t.clone().requires_grad_() for t in (x[8:], weight, bias, initial[2:])]
    found = bind(causal_conv1d, [30])(*alone)
    assert torch.equal(found, y[8:])
    found = torch.autograd.grad(found, alone, cotangent[8:])
    assert torch.equal(found[0], grads[0][8:])
    assert torch.equal(found[3], grads[3][2:])
    spoiled = x.clone()
    spoiled[:7], spoiled[8:] = torch.nan, torch.nan
    assert torch.equal(bind(causal_conv1d, lengths)(spoiled, weight, bias, initial)[7:8], y[7:8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [17] if INTERPRETED else [1, 17, 125])
def test_steps_do_not_depend_on_the_batch(dtype, channels):
    """A row is a sequence's one new token with the inputs before it."""
    _, weight, bias, _ = make([1], channels, dtype)

    def step(rows):
        rows = rows.unflatten(1, (WIDTH, channels))
        return causal_conv1d(rows[:, -1], weight, bias, [1] * len(rows), rows[:, :-1])

    assert dependent_rows(step, torch.randn(50, WIDTH * channels).to(dtype)) == []


@pytest.mark.parametrize("past", [-200.0, 200.0])
def test_far_tails_are_finite(past):
    x = torch.full((2, 3), past, requires_grad=True)
    y = causal_conv1d(x, torch.ones(3, WIDTH), None, [2])
    assert bool(y.isfinite().all())
    assert bool(torch.autograd.grad(y.sum(), x)[0].isfinite().all())


def test_what_does_not_fit_is_refused():
    x, weight, bias, initial = make([5], 8, FP32)
    with pytest.raises(ValueError, match="4 tokens in all for 5 rows"):
        causal_conv1d(x, weight, bias, [4])
    with pytest.raises(ValueError, match="initial"):
        causal_conv1d(x, weight, bias, [5], initial[:, 1:])
    with pytest.raises(ValueError, match="initial"):
        causal_conv1d(x, weight, bias, [5], initial.bfloat16())
    counts = bounds_of([5], x.device), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="state"):
        causal_conv1d_cached(x, weight, bias, *counts, initial.bfloat16(), torch.tensor([0]))
    with pytest.raises(ValueError, match="2 bounds, 1 positions and 2 slots"):
        causal_conv1d_cached(x, weight, bias, *counts, initial, torch.tensor([0, 0]))
