"""Gated group norm: float64 values and gradients, and bits that neither other rows nor other groups change."""

import pytest
import torch
from torch.nn.functional import silu

from megatron_rlzero.kernels.norm import gated_group_norm
from tests.kernels.checks import BF16, DTYPES, FP32, dependent_rows, error, errors, rounded_once, tolerance

EPS = 1e-5


def oracle(x, gate, weight, groups, eps=EPS):
    z = (x * silu(gate)).unflatten(1, (groups, -1))
    return (z / (z.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(1) * weight


def make(tokens, d, dtype):
    x, gate = torch.randn(tokens, d).to(dtype), (torch.randn(tokens, d) * 2).to(dtype)
    return x, gate, torch.linspace(0.5, 1.5, d).to(dtype)


def bind(f, groups):
    return lambda x, gate, weight: f(x, gate, weight, groups, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "d", "groups"), [(1, 32, 1), (5, 96, 2), (17, 1000, 8), (3, 24, 3)])
def test_value_and_gradients(dtype, tokens, d, groups):
    inputs = make(tokens, d, dtype)
    y = bind(gated_group_norm, groups)(*inputs)
    assert y.dtype == dtype
    assert rounded_once(y, bind(oracle, groups)(*(t.double() for t in inputs)))
    assert max(errors(bind(gated_group_norm, groups), bind(oracle, groups), inputs)) < tolerance(dtype)
    if groups > 1:
        assert error(bind(gated_group_norm, 1)(*inputs), y) > 1e-2


def test_other_orders_of_gate_and_norm_and_a_second_rounding_are_noticed():
    x, gate, weight = make(5, 96, BF16)
    wanted = bind(oracle, 2)(*(t.double() for t in (x, gate, weight)))
    z = x.float().unflatten(1, (2, -1))
    first = (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1) * weight * silu(gate.float())
    assert error(first, wanted) > 0.1
    assert not rounded_once(gated_group_norm((x * silu(gate)), torch.full_like(gate, 100), weight, 2, EPS), wanted)


@pytest.mark.parametrize("gate", [-1e4, -89.0, 89.0, 1e4])
def test_far_tails_are_finite(gate):
    x, _, weight = make(3, 32, FP32)
    leaves = [x.requires_grad_(), torch.full_like(x, gate).requires_grad_()]
    y = gated_group_norm(*leaves, weight, 2, EPS)
    assert all(bool(t.isfinite().all()) for t in (y, *torch.autograd.grad(y.sum(), leaves)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "groups"), [(32, 1), (100, 2), (127, 1), (1024, 8), (2000, 4)])
def test_rows_do_not_depend_on_the_batch(dtype, d, groups):
    weight = make(1, d, dtype)[2]
    f = lambda rows: gated_group_norm(*rows.chunk(2, 1), weight, groups, EPS)  # noqa: E731
    assert dependent_rows(f, torch.randn(50, 2 * d).to(dtype)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_of_the_groups_has_the_bits_of_all(dtype):
    for tokens in (1, 37):
        inputs = [t.requires_grad_() for t in make(tokens, 256, dtype)]
        y = bind(gated_group_norm, 4)(*inputs)
        cotangent = torch.randn(y.shape).to(dtype)
        grads = torch.autograd.grad(y, inputs, cotangent)
        for half in (slice(0, 128), slice(128, 256)):
            mine = [t.detach()[..., half].clone().requires_grad_() for t in inputs]
            found = bind(gated_group_norm, 2)(*mine)
            assert torch.equal(found, y[:, half])
            found = torch.autograd.grad(found, mine, cotangent[:, half])
            assert all(torch.equal(a, b[..., half]) for a, b in zip(found, grads, strict=True))


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 groups do not divide 32"):
        gated_group_norm(*make(2, 32, FP32), 5, EPS)
