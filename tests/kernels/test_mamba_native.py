"""The compiled scan: torch's form within rounding, one result from two instruction sets, and its refusals."""

import pytest
import torch

from megatron_rlzero.kernels import compiler
from megatron_rlzero.kernels.mamba import gradients, native, reference, scan, scan_cached
from tests.kernels.checks import BF16, DTYPES, FP32, error, tolerance
from tests.kernels.test_mamba import LENGTHS, LIMIT, SIZES, Q, bind, make
from tests.kernels.test_mamba_cached import empty

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.usefixtures("form"),
    pytest.mark.parametrize("form", ["native"], indirect=True),
]


def results(form, backward, inputs, lengths):
    """y and all gradients."""
    *inputs, initial = inputs
    y, saved = form.scan(inputs, lengths, LIMIT, initial, True)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    return y, *backward.gradients(inputs, lengths, LIMIT, initial, saved, cotangent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_native_is_torch_within_rounding(dtype, sizes):
    inputs = make(sum(LENGTHS), sizes, dtype, len(LENGTHS))
    found, wanted = results(native, native, inputs, LENGTHS), results(reference, gradients, inputs, LENGTHS)
    assert max(map(error, found, wanted)) < tolerance(dtype, roundings=2)
    assert dtype == BF16 or not torch.equal(found[0], wanted[0])
    inputs[6] += 1e-3
    assert error(results(native, native, inputs, LENGTHS)[2], wanted[2]) > 2 * tolerance(FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES[2:])
@pytest.mark.parametrize("flags", [("-march=x86-64-v3",), ("-O1", "-march=x86-64-v3"), ("-march=x86-64-v2",)])
def test_another_instruction_set_gives_the_same_bits(monkeypatch, dtype, sizes, flags):
    """The order of every sum is the source's, not the compiler's."""
    inputs = make(sum(LENGTHS), sizes, dtype, len(LENGTHS))
    wanted = results(native, native, inputs, LENGTHS)
    other = compiler.compiled("mamba", (*compiler.FLAGS, *flags))
    monkeypatch.setattr(native, "compiled", lambda name: other)
    assert all(map(torch.equal, results(native, native, inputs, LENGTHS), wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_time_steps(dtype):
    """softplus of every size, and the clamp: a first token alone is dt (C . B) x."""
    small = torch.logspace(-6, 1, 500)
    raw = torch.cat([torch.linspace(-100, 100, 4001), -small, small]).to(dtype)
    n = len(raw)
    one, none = torch.ones(n, 1, 8, dtype=dtype), torch.zeros(1)
    inputs = (one, raw[:, None], none - 1, one / 8, one, none, none)
    for limit in ((0.0, torch.inf), LIMIT):
        y = scan(*inputs, [1] * n, limit)[:, 0, 0]
        wanted = torch.nn.functional.softplus(raw.double(), threshold=1e3).clamp(*limit)
        wrong = (y.double() - wanted).abs() > wanted * (2.0**-22 if dtype == FP32 else 2.0**-8) + 1e-37
        assert not bool(wrong.any())


def test_views_are_read_in_place():
    """x, B and C as slices of one tensor, and dt of another, which is how the layers have them."""
    inputs = make(40, (4, 16, 2, 16))
    both = torch.cat([inputs[i].flatten(1) for i in (0, 3, 4, 1)], 1)
    x, B, C, dt = both.split([64, 32, 32, 4], 1)
    views = [x.unflatten(1, (4, 16)), dt, inputs[2], B.unflatten(1, (2, 16)), C.unflatten(1, (2, 16)), *inputs[5:]]
    assert not any(views[i].is_contiguous() for i in (0, 1, 3, 4))
    assert torch.equal(bind(scan, [40])(*views), bind(scan, [40])(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_what_is_not_finite_is_seen_from_its_token_on(dtype, bad, which):
    inputs = make(3 * Q, SIZES[0], dtype)
    wanted = bind(scan, [3 * Q], (0.0, torch.inf))(*inputs)
    inputs[which][Q + 5] = bad
    found = bind(scan, [3 * Q], (0.0, torch.inf))(*inputs)
    assert torch.equal(found[: Q + 5], wanted[: Q + 5])
    assert not bool(found[Q + 5 : 2 * Q].isfinite().all(-1).any())


def test_what_does_not_fit_is_refused():
    inputs = make(5, SIZES[0])
    with pytest.raises(TypeError, match=r"one dtype: torch\.float32 on cpu, torch\.bfloat16 on cpu"):
        scan(inputs[0], inputs[1].to(BF16), *inputs[2:], [5])
    with pytest.raises(TypeError, match=r"torch\.float64"):
        scan(*(t.double() if i in (0, 1, 3, 4) else t for i, t in enumerate(inputs)), [5])
    cache = empty(3, SIZES[0], FP32)
    for slots in ([3], [-1]):
        with pytest.raises(ValueError, match=r"slots .* of a cache of 3 blocks"):
            scan_cached(*inputs, [5], [0], cache._replace(slots=torch.tensor(slots)))
    cache = cache._replace(slots=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"x of the cache is torch\.bfloat16"):
        scan_cached(*inputs, [5], [0], cache._replace(x=cache.x.to(BF16)))
    with pytest.raises(ValueError, match=rf"dt of the cache .* expected is torch\.float32 \[blocks, {Q}, 4\]"):
        scan_cached(*inputs, [5], [0], cache._replace(dt=cache.dt.transpose(1, 2)))
