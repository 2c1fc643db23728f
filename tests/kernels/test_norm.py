"""RMSNorm: float64 values and gradients, and rows whose bits no batch changes."""

import pytest
import torch

from megatron_rlzero.kernels.norm import rms_norm
from tests.kernels.checks import BF16, DTYPES, FP32, dependent_rows, error, errors, rounded_once, tolerance

EPS = 1e-6


def norm(x, weight):
    return rms_norm(x, weight, EPS)


def oracle(x, weight, eps=EPS):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def make(dtype, *shape):
    return torch.randn(*shape).to(dtype), torch.linspace(0.5, 1.5, shape[-1]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (5, 100), (3, 7, 64), (17, 1000)])
def test_value_and_gradients(dtype, shape):
    x, weight = make(dtype, *shape)
    y = norm(x, weight)
    assert y.shape == x.shape
    assert y.dtype == dtype
    assert rounded_once(y, oracle(x.double(), weight.double()))
    assert max(errors(norm, oracle, (x, weight))) < tolerance(dtype)


def test_small_rows_feel_eps_and_rows_of_zeros_stay_finite():
    x, weight = make(FP32, 4, 64)
    x = x * 1e-3
    assert max(errors(norm, oracle, (x, weight))) < tolerance(FP32)
    assert error(norm(x, weight), oracle(x, weight, 0.0)) > 0.1
    assert norm(torch.zeros(2, 64), weight).eq(0).all()


def test_a_second_rounding_is_noticed():
    x, weight = make(BF16, 5, 100)
    twice = oracle(x.float(), 1.0).bfloat16() * weight
    assert not rounded_once(twice, oracle(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 100, 127, 512, 1000, 2048])
def test_rows_do_not_depend_on_the_batch(dtype, hidden):
    x, weight = make(dtype, 50, hidden)
    assert dependent_rows(lambda rows: norm(rows, weight), x) == []
    heads = x[:48].unflatten(0, (12, 4))
    assert torch.equal(norm(heads, weight).flatten(0, 1), norm(x, weight)[:48])


def test_another_order_of_the_sum_is_noticed():
    """What is compared has bits to differ in: the same mean from the row turned round."""
    x, weight = make(FP32, 50, 1000)
    turned = norm(x.flip(-1), weight.flip(-1)).flip(-1)
    assert not torch.equal(turned, norm(x, weight))
    assert error(turned, norm(x, weight)) < tolerance(FP32)
