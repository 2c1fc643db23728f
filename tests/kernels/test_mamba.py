"""Mamba-2 scan, every form: the recurrence in float64, and bits of a document and of a group that nothing changes."""

import pytest
import torch

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import buffers, layout, scan
from tests.kernels.checks import BF16, DTYPES, FP32, INTERPRETED, error, errors, rounded_once, tolerance, with_gradients
from tests.oracle import selective_scan

pytestmark = pytest.mark.usefixtures("form")

Q = tiles.CHUNK
LENGTHS = [1, 2 * Q + 3, Q - 1, Q] if INTERPRETED else [1, 3 * Q + 5, 1, Q - 1, Q, 3, Q + 1, 2 * Q]
#: heads, head dimension, groups, state size
SIZES = [(4, 16, 1, 16), (8, 8, 8, 16), (6, 24, 2, 40), (4, 64, 2, 128)]
#: one dtype of each size is enough for an interpreter
CASES = [(dtype, sizes) for dtype in DTYPES for sizes in SIZES]
if INTERPRETED:
    SIZES = [(2, 16, 1, 16), (4, 24, 2, 40), (1, 64, 1, 128)]
    CASES = list(zip((BF16, FP32, BF16), SIZES, strict=True))
LIMIT = (0.02, 1.0)


@pytest.fixture(autouse=True)
def fresh_buffers():
    """So that they hold NaN, as all memory that nothing was written to."""
    buffers._buffers.cache_clear()


def make(tokens, sizes, dtype=FP32, documents=0):
    """x, dt, A, B, C, D, dt_bias, and initial states if there are ``documents``."""
    H, P, G, N = sizes
    shapes = ((tokens, H, P), (tokens, H), (tokens, G, N), (tokens, G, N))
    x, dt, B, C = (torch.randn(*shape).to(dtype) for shape in shapes)
    inputs = [x, dt, -torch.rand(H) * 8 - 0.1, B, C, torch.randn(H), torch.randn(H) - 2]
    return [*inputs, torch.randn(documents, H, P, N)] if documents else inputs


def bind(f, lengths, limit=LIMIT):
    """``f`` of the tensors alone."""
    return lambda *t: f(*t[:7], lengths, limit, *t[7:])


def part(inputs, tokens=slice(None), documents=slice(None), half=None):
    """Inputs of some tokens, and of the first or second half of the groups."""
    x, dt, A, B, C, D, bias, initial = inputs
    h, g = (slice(None) if half is None else slice(half * n // 2, (half + 1) * n // 2) for n in (len(A), B.shape[1]))
    x, dt, B, C = x[tokens, h], dt[tokens, h], B[tokens, g], C[tokens, g]
    return [x, dt, A[h], B, C, D[h], bias[h], initial[documents, h]]


@pytest.mark.parametrize(("dtype", "sizes"), CASES)
def test_value_and_gradients(dtype, sizes):
    inputs = make(sum(LENGTHS), sizes, dtype, len(LENGTHS))
    y = bind(scan, LENGTHS)(*inputs)
    assert y.dtype == dtype
    assert rounded_once(y, bind(selective_scan, LENGTHS)(*(t.double() for t in inputs)))
    assert max(errors(bind(scan, LENGTHS), bind(selective_scan, LENGTHS), inputs)) < tolerance(dtype)


def test_without_initial_states_and_limits_and_what_would_be_noticed():
    inputs = make(sum(LENGTHS), SIZES[0])
    found, wanted = bind(scan, LENGTHS, (0.0, torch.inf)), bind(selective_scan, LENGTHS, (0.0, torch.inf))
    assert max(errors(found, wanted, inputs)) < tolerance(FP32)
    y = found(*inputs)
    assert error(bind(scan, LENGTHS)(*inputs), y) > 1e-3
    merged = [LENGTHS[0] + LENGTHS[1], *LENGTHS[2:]]
    assert error(bind(scan, merged, (0.0, torch.inf))(*inputs), y) > 1e-3
    assert error(found(*inputs[:5], inputs[5] * (1.001 if INTERPRETED else 1.0001), inputs[6]), y) > tolerance(FP32)


def test_states_that_die_out_within_a_chunk():
    """Sums of A dt far below what exp can represent, and time steps of zero."""
    inputs = make(3 * Q + 1, (4, 16, 1, 16))
    inputs[2], inputs[1][::3] = inputs[2] * 1e4, -200.0
    found, wanted = bind(scan, [3 * Q + 1], (0.0, torch.inf)), bind(selective_scan, [3 * Q + 1], (0.0, torch.inf))
    assert max(errors(found, wanted, inputs)) < tolerance(FP32)


@pytest.mark.parametrize(("log", "zero"), [(-55.4, False), (-55.5, True)])
def test_what_is_left_of_a_token_is_zero_from_a_stated_size_on(log, zero):
    assert (torch.tensor(log).exp() <= tiles.FAINT) == zero
    one, scalar = torch.ones(2, 1, 8), torch.ones(1)
    x = torch.stack((one[0], 0 * one[1]))
    y = scan(x, torch.tensor([[0.0], [-log]]), -scalar, one, one, 0 * scalar, 0 * scalar, [2])[1]
    assert bool((y == 0).all()) == zero
    assert bool(y.isfinite().all())


@pytest.mark.parametrize(("dtype", "sizes"), CASES)
def test_packed_documents_have_the_bits_of_each_alone(dtype, sizes):
    inputs = make(sum(LENGTHS), sizes, dtype, len(LENGTHS))
    y, *grads = with_gradients(bind(scan, LENGTHS), inputs)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).bfloat16()
    start = 0
    for i, length in enumerate(LENGTHS):
        tokens, document = slice(start, start + length), slice(i, i + 1)
        start += length
        alone = [t.clone().requires_grad_() for t in part(inputs, tokens, document)]
        found = bind(scan, [length])(*alone)
        assert torch.equal(found, y[tokens])
        found = torch.autograd.grad(found, alone, cotangent[tokens].to(dtype))
        for k in (0, 1, 3, 4):
            assert torch.equal(found[k], grads[k][tokens])
        assert torch.equal(found[7], grads[7][document])


@pytest.mark.parametrize("sizes", SIZES[:1] if INTERPRETED else [SIZES[0], SIZES[2]])
def test_many_chunks(sizes):
    """More than lie between two states that are kept for the backward pass."""
    lengths = [2 * Q + 5, Q + 1, 2] if INTERPRETED else [17 * Q + 5, 8 * Q, 8 * Q + 1, 2]
    inputs = make(sum(lengths), sizes, FP32, len(lengths))
    inputs[2] /= 100  # states reach from end to end
    assert max(errors(bind(scan, lengths), bind(selective_scan, lengths), inputs)) < tolerance(FP32)
    tokens, cotangent = slice(lengths[0], sum(lengths[:2])), torch.zeros_like(inputs[0])
    cotangent[tokens] = 1
    alone = [t.requires_grad_() for t in part(inputs, tokens, slice(1, 2))]
    wanted = torch.autograd.grad(bind(scan, lengths[1:2])(*alone), alone, cotangent[tokens])
    leaves = [t.clone().requires_grad_() for t in inputs]
    found = torch.autograd.grad(bind(scan, lengths)(*leaves), leaves, cotangent)
    for k in (0, 1, 3, 4):
        assert torch.equal(found[k][tokens], wanted[k])
        assert not bool(found[k][: lengths[0]].any())
    assert torch.equal(found[7][1:2], wanted[7])


@pytest.mark.parametrize(("dtype", "sizes"), [case for case in CASES if case[1][2] > 1])
def test_half_of_the_groups_has_the_bits_of_all(dtype, sizes):
    inputs = make(sum(LENGTHS), sizes, dtype, len(LENGTHS))
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = bind(scan, LENGTHS)(*leaves)
    cotangent = torch.randn(y.shape).to(dtype)
    grads = torch.autograd.grad(y, leaves, cotangent)
    for half in (0, 1):
        mine = [t.clone().requires_grad_() for t in part(inputs, half=half)]
        found = bind(scan, LENGTHS)(*mine)
        heads = slice(half * sizes[0] // 2, (half + 1) * sizes[0] // 2)
        assert torch.equal(found, y[:, heads])
        found = torch.autograd.grad(found, mine, cotangent[:, heads])
        for a, b in zip(found, part(grads, half=half), strict=True):
            assert torch.equal(a, b)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_the_order_of_the_work_change_no_bit(dtype, monkeypatch):
    inputs = make(sum(LENGTHS), (8, 64, 2, 128), dtype, len(LENGTHS))
    torch.set_num_threads(1)
    wanted = with_gradients(bind(scan, LENGTHS), inputs)
    for threads, moved, held, steps in ((2, layout.MOVED, layout.HELD, layout.STEPS), (1, 1, 1, 1), (2, 2**30, 1, 2)):
        torch.set_num_threads(threads)
        for name, value in (("MOVED", moved), ("HELD", held), ("STEPS", steps)):
            monkeypatch.setattr(layout, name, value)
        layout._batches.cache_clear()
        assert all(map(torch.equal, with_gradients(bind(scan, LENGTHS), inputs), wanted)), (threads, moved)


@pytest.mark.skipif(not INTERPRETED, reason="of the Triton form")
def test_groups_in_turn_change_no_bit(monkeypatch):
    from megatron_rlzero.kernels.mamba import triton_backward

    inputs = make(12, SIZES[1], FP32, 2)
    wanted = with_gradients(bind(scan, [7, 5]), inputs)
    monkeypatch.setattr(triton_backward, "HELD", 1)
    assert all(map(torch.equal, with_gradients(bind(scan, [7, 5]), inputs), wanted))


@pytest.mark.cpu
@pytest.mark.parametrize("form", ["torch"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_chunks_are_noticed(dtype, monkeypatch):
    inputs = make(sum(LENGTHS), (8, 64, 2, 128), dtype, len(LENGTHS))
    wanted = with_gradients(bind(scan, LENGTHS), inputs)
    layout._batches.cache_clear()
    monkeypatch.setattr(tiles, "CHUNK", 2 * Q)
    other = with_gradients(bind(scan, LENGTHS), inputs)
    assert dtype != FP32 or not torch.equal(other[0], wanted[0])
    assert error(other[0], wanted[0]) < tolerance(dtype, roundings=2)


@pytest.mark.parametrize("length", [1, Q + 1] if INTERPRETED else [1, Q - 1, Q, Q + 1])
def test_a_neighbour_of_nan_has_no_influence(length):
    inputs = make(2 * length + 3, SIZES[0])
    lengths, middle = [length, 3, length], slice(length, length + 3)
    for t in inputs[:2] + inputs[3:5]:
        t[:length] = t[length + 3 :] = torch.nan
    alone = [t[middle] if len(t) == 2 * length + 3 else t for t in inputs]
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = bind(scan, lengths)(*leaves)
    assert torch.equal(y[middle], bind(scan, [3])(*alone))
    assert y[:length].isnan().all()
    to_x = torch.autograd.grad(y[middle].sum(), leaves[0])[0][middle]
    alone[0].requires_grad_()
    assert torch.equal(to_x, torch.autograd.grad(bind(scan, [3])(*alone).sum(), alone[0])[0])


def test_what_does_not_fit_is_refused():
    inputs = make(5, (4, 12, 1, 16))
    with pytest.raises(ValueError, match=r"head dimension 12 .* multiples of 8"):
        scan(*inputs, [5])
    inputs = make(5, (4, 16, 1, 16))
    for lengths in ([4], [5, 0], []):
        with pytest.raises(ValueError, match="lengths"):
            scan(*inputs, lengths)
    with pytest.raises(TypeError, match="bfloat16"):
        scan(*inputs[:2], inputs[2].bfloat16(), *inputs[3:], [5])
    with pytest.raises(ValueError, match=r"initial states torch\.float32 \(2, 4, 16, 16\); expected are fp32 \(1, 4"):
        scan(*inputs, [5], initial=torch.zeros(2, 4, 16, 16))
    with pytest.raises(ValueError, match="divides the heads"):
        scan(*inputs[:3], *(t.repeat(1, 3, 1) for t in inputs[3:5]), *inputs[5:], [5])
