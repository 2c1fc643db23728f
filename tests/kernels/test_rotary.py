"""Rotary embedding: a table as good as float64, rotations against complex numbers, rows free of the batch."""

import pytest
import torch

from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table
from megatron_rlzero.kernels.rotary.reference import llama3_frequencies
from tests.kernels.checks import DTYPES, FP32, dependent_rows, error, errors, rounded_once, tolerance

BASE = 1e6


def angles(positions, dim):
    return positions.double()[:, None] * BASE ** (-torch.arange(0, dim, 2).double() / dim)


def oracle(x, positions):
    """Element i of the first half and of the second are one complex number, turned by the angle."""
    first, second = x.chunk(2, -1)
    turn = angles(positions, x.shape[-1])[:, None]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dim", [2, 32, 126])
def test_table_is_rounded_once(dim):
    table = rotary_table(5000, dim, BASE)
    assert table.shape == (5000, 2, dim // 2)
    assert table.dtype == FP32
    angle = angles(torch.arange(5000), dim)
    assert torch.equal(table, torch.stack((angle.cos(), angle.sin()), 1).float())
    assert torch.equal(rotary_table(37, dim, BASE), table[:37])


def test_an_fp32_table_is_noticed():
    dim, position = 128, 40_000
    frequency = BASE ** (-torch.arange(0, dim, 2).float() / dim)
    wanted = angles(torch.tensor([position]), dim).cos()
    assert error((position * frequency).cos()[None], wanted) > 1e-4
    assert error(rotary_table(position + 1, dim, BASE)[position, 0][None], wanted) < 1e-7


@pytest.mark.cpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("settings", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.5, 0.5, 7.0, 100)])
def test_llama3_scaling_is_that_of_transformers(dim, settings):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **dict(zip(names, settings, strict=True))}
    config = LlamaConfig(head_dim=dim, max_position_embeddings=131_072, rope_parameters=rope)
    wanted, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config)
    assert attention_factor == 1.0
    plain = 5e5 ** (-torch.arange(0, dim, 2).double() / dim)
    found = llama3_frequencies(plain, *settings)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-6, atol=0)
    kept, scaled = found == plain, found == plain / settings[0]
    assert kept.any() and scaled.any() and not (kept | scaled).all()  # all three ranges are there
    angle = torch.arange(5000).double()[:, None] * found
    table = rotary_table(5000, dim, 5e5, scaling=settings)
    assert torch.equal(table, torch.stack((angle.cos(), angle.sin()), 1).float())
    assert not torch.equal(table, rotary_table(5000, dim, 5e5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_value_and_gradient(dtype, tokens):
    table = rotary_table(600, 32, BASE)
    x, positions = torch.randn(tokens, 3, 32).to(dtype), torch.randint(0, 600, (tokens,))
    y = apply_rotary(x, table, positions)
    assert y.dtype == dtype
    assert rounded_once(y, oracle(x.double(), positions))
    f, wanted = lambda a: apply_rotary(a, table, positions), lambda a: oracle(a, positions)
    assert max(errors(f, wanted, (x,))) < tolerance(dtype)


def test_interleaved_pairs_are_noticed():
    table, x, positions = rotary_table(600, 32, BASE), torch.randn(5, 3, 32), torch.arange(5) + 3
    interleaved = x.unflatten(-1, (16, 2)).transpose(-1, -2).flatten(-2)
    assert error(apply_rotary(interleaved, table, positions), oracle(x.double(), positions)) > 0.1


def test_scores_depend_on_the_distance_alone():
    table = rotary_table(600, 32, BASE).double()
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)

    def score(i, j):
        at = (apply_rotary(x, table, torch.tensor([p])).double() for x, p in ((q, i), (k, j)))
        return float((next(at) * next(at)).sum())

    assert abs(score(7, 3) - score(504, 500)) < 1e-4  # computed in fp32
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 126])
def test_rows_do_not_depend_on_the_batch(dtype, dim):
    """Rows carry their position with them, in the last column."""
    table, x = rotary_table(600, dim, BASE), torch.randn(50, 3 * dim)
    rows = torch.cat((x, torch.randint(0, 600, (50, 1))), 1)

    def f(rows):
        positions = rows[:, -1].nan_to_num(nan=599).abs().long().clamp_max(599)
        return apply_rotary(rows[:, :-1].to(dtype).unflatten(1, (3, dim)), table, positions)

    assert dependent_rows(f, rows) == []
    assert dependent_rows(lambda r: apply_rotary(r[:, :-1].unflatten(1, (3, dim)), table, torch.arange(len(r))), rows)
