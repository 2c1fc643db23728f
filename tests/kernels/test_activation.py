"""Activations: float64 values and gradients, the far tails, and rows whose bits no batch changes."""

import pytest
import torch
from torch.nn import functional as F

from megatron_rlzero.kernels.activation import silu_and_mul, softplus, squared_relu
from tests.kernels.checks import DTYPES, FP32, dependent_rows, errors, rounded_once, tolerance, with_gradients


def oracle(x):
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 66), (5, 96), (2, 3, 254)])
def test_value_and_gradient(dtype, shape):
    x = (torch.randn(*shape) * 3).to(dtype)
    y = silu_and_mul(x)
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert y.dtype == dtype
    assert rounded_once(y, oracle(x.double()))
    assert max(errors(silu_and_mul, oracle, (x,))) < tolerance(dtype)


def test_swapped_halves_and_a_second_rounding_are_noticed():
    x = (torch.randn(5, 96) * 3).bfloat16()
    gate, up = x.chunk(2, -1)
    assert not rounded_once(silu_and_mul(torch.cat((up, gate), -1)), oracle(x.double()))
    assert not rounded_once(F.silu(gate) * up, oracle(x.double()))
    assert errors(lambda a: silu_and_mul(a) * 1.0001, oracle, (x.float(),))[0] > tolerance(FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [-1e4, -200.0, -89.0, -88.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e4])
def test_far_tails_are_finite_with_finite_gradients(dtype, gate):
    """exp(-gate) overflows fp32 below -88.7; silu and its derivative are 0 there."""
    x = torch.tensor([[gate, 2.0]]).to(dtype)
    for found, wanted in zip(with_gradients(silu_and_mul, (x,)), with_gradients(oracle, (x.double(),)), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance(dtype), atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 17, 48, 125, 1000])
def test_rows_do_not_depend_on_the_batch(dtype, width):
    assert dependent_rows(silu_and_mul, (torch.randn(50, 2 * width) * 3).to(dtype)) == []


@pytest.mark.cpu
def test_the_library_alone_depends_on_the_batch():
    assert dependent_rows(F.silu, torch.randn(50, 125) * 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (2, 3, 127)])
def test_squared_relu(dtype, shape):
    x = (torch.randn(*shape) * 3).to(dtype)
    x.view(-1)[0] = 0
    wanted = lambda x: F.relu(x).square()  # noqa: E731
    y = squared_relu(x)
    assert y.dtype == dtype
    assert rounded_once(y, wanted(x.double()))
    if x.numel() > 1:
        assert max(errors(squared_relu, wanted, (x,))) < tolerance(dtype)
        assert errors(lambda a: squared_relu(a) * 1.01, wanted, (x,))[0] > tolerance(dtype)
    assert dependent_rows(squared_relu, torch.randn(50, shape[-1]).to(dtype)) == []


def test_softplus_and_its_tails():
    x = torch.cat((torch.randn(1000) * 10, torch.tensor([-1e4, -104.0, -88.0, 0.0, 20.0, 89.0, 1e4])))
    wanted = torch.logaddexp(x.double(), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(softplus(x).double(), wanted, rtol=1e-6, atol=1e-38)
    assert not torch.allclose(softplus(x).double(), F.relu(x.double()), atol=1e-3)


@pytest.mark.parametrize("width", [1, 17, 125])
def test_rows_of_softplus_do_not_depend_on_the_batch(width):
    assert dependent_rows(softplus, torch.randn(50, width) * 3) == []


def test_the_librarys_softplus_depends_on_the_batch():
    assert dependent_rows(F.softplus, torch.randn(50, 125) * 3)
