"""Grouped linear and combine: float64 values and gradients, experts without rows, order of the sum, bits of a row."""

import pytest
import torch

from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.experts import combine, grouped_linear, mlp, permute, unpermute
from tests.kernels.checks import BF16, DTYPES, FP32, INTERPRETED, dependent_rows, error, errors, rounded_once, tolerance


def grouped_oracle(rows):
    expert = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    return lambda x, *weights: torch.einsum("tk,tnk->tn", x, torch.stack(weights)[expert])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[1], [3, 0, 17, 1], [0, 0, 5], [16, 16]])
def test_grouped_linear_value_and_gradients(dtype, rows):
    inputs = [torch.randn(sum(rows), 48).to(dtype), *(torch.randn(33, 48).to(dtype) for _ in rows)]
    f = lambda x, *weights: grouped_linear(x, weights, rows)  # noqa: E731
    y = f(*inputs)
    assert y.shape == (sum(rows), 33)
    assert y.dtype == dtype
    assert rounded_once(y, grouped_oracle(rows)(*(t.double() for t in inputs)))
    assert max(errors(f, grouped_oracle(rows), inputs)) < tolerance(dtype)
    shifted = lambda x, *weights: grouped_linear(x, weights[1:] + weights[:1], rows)  # noqa: E731
    if len(rows) > 1:
        assert error(shifted(*inputs), y) > 0.1


@pytest.mark.parametrize("rows", [[4, 0, 3], [0, 0, 0]])
def test_an_expert_without_rows_gets_a_zero_gradient(rows):
    x = torch.randn(sum(rows), 48)
    weights = [torch.randn(33, 48).requires_grad_() for _ in rows]
    y = grouped_linear(x, weights, rows)
    assert y.shape == (sum(rows), 33)
    y.sum().backward()
    for weight, count in zip(weights, rows, strict=True):
        assert weight.grad is not None
        assert weight.grad.any() == (count > 0)
        assert weight.grad.isfinite().all()


def test_counts_that_do_not_fit_are_refused():
    x, weights = torch.randn(5, 48), [torch.randn(33, 48)] * 2
    with pytest.raises(RuntimeError):
        grouped_linear(x, weights, [2, 2])
    with pytest.raises(ValueError):
        grouped_linear(x, weights, [2, 2, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_other_rows_and_experts(dtype):
    weights = [torch.randn(33, 96).to(dtype) for _ in range(3)]
    for before, after in ((0, 0), (5, 9)):
        one, other = torch.randn(before, 96).to(dtype), torch.randn(after, 96).to(dtype)

        def middle(x, one=one, other=other):
            y = grouped_linear(torch.cat((one, x, other)), weights, [len(one), len(x), len(other)])
            return y[len(one) : len(one) + len(x)]

        x = torch.randn(50, 96).to(dtype)
        assert dependent_rows(middle, x) == []
        assert torch.equal(middle(x), grouped_linear(x, weights[1:2], [50]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_anywhere_in_memory(dtype):
    """Not at a multiple of the 16 bytes that are read at once."""
    x, weights = torch.randn(20, 64).to(dtype), torch.randn(3, 32, 64).to(dtype)
    moved = torch.empty(weights.numel() + 1, dtype=dtype)[1:].view_as(weights).copy_(weights)
    wanted = grouped_linear(x, weights.unbind(), [7, 0, 13])
    assert torch.equal(grouped_linear(x, moved.unbind(), [7, 0, 13]), wanted)
    assert torch.equal(grouped_linear(x, [weights[0], *moved[1:]], [7, 0, 13]), wanted)
    experts, w2 = torch.randint(0, 3, (20, 2)), torch.randn(3, 64, 32).to(dtype)
    assert torch.equal(mlp(x, experts, moved, w2, False), mlp(x, experts, weights, w2, False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (5, 2), (33, 8), (0, 2)])
def test_permuted_rows_and_their_gradients(dtype, tokens, k):
    slots, x = torch.randperm(tokens * k).view(tokens, k), torch.randn(tokens, 100).to(dtype).requires_grad_()
    rows = permute(x, slots)
    for token in range(tokens):
        assert torch.equal(rows[slots[token]], x[token].expand(k, -1))
    assert torch.equal(unpermute(rows, slots), x[:, None].expand(-1, k, -1))
    grad = torch.randn(tokens * k, 100).to(dtype)
    (found,) = torch.autograd.grad(rows, x, grad)
    assert torch.equal(found, combine(grad[slots], torch.ones(tokens, k)))  # from the first expert on, rounded once
    rows = torch.randn(tokens * k, 100).to(dtype).requires_grad_()
    grad = torch.randn(tokens, k, 100).to(dtype)
    (found,) = torch.autograd.grad(unpermute(rows, slots), rows, grad)
    assert torch.equal(found[slots], grad)


def combine_oracle(outputs, probabilities):
    return torch.einsum("tkh,tk->th", outputs, probabilities)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (5, 2), (33, 8)])
def test_combine_value_and_gradients(dtype, tokens, k):
    outputs, probabilities = torch.randn(tokens, k, 100).to(dtype), torch.rand(tokens, k)
    y = combine(outputs, probabilities)
    assert y.dtype == dtype
    assert rounded_once(y, combine_oracle(outputs.double(), probabilities.double()))
    assert max(errors(combine, combine_oracle, (outputs, probabilities))) < tolerance(dtype)


def test_sums_rounded_in_between_are_noticed():
    outputs, probabilities = torch.randn(5, 8, 100).to(BF16), torch.rand(5, 8)
    total = torch.zeros(5, 100, dtype=BF16)
    for slot in range(8):
        total = total + outputs[:, slot] * probabilities[:, slot, None].to(BF16)
    assert not rounded_once(total, combine_oracle(outputs.double(), probabilities.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_adds_from_the_first_slot_on(dtype):
    outputs, probabilities = torch.randn(50, 4, 100).to(dtype), torch.rand(50, 4)
    a, b, c, d = (outputs.float() * probabilities[..., None]).unbind(1)
    assert torch.equal(combine(outputs, probabilities), (((a + b) + c) + d).to(dtype))
    turned = combine(outputs.flip(1), probabilities.flip(1))
    assert error(turned, combine(outputs, probabilities)) < tolerance(dtype, roundings=2)
    if dtype == FP32:  # in bf16 the rounding hides the order in all but few elements
        assert not torch.equal(turned, combine(outputs, probabilities))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [127] if INTERPRETED else [32, 127, 1000])
def test_combined_rows_do_not_depend_on_the_batch(dtype, hidden):
    probabilities = torch.rand(4)
    f = lambda x: combine(x.unflatten(1, (4, hidden)), probabilities.expand(len(x), 4))  # noqa: E731
    assert dependent_rows(f, torch.randn(50, 4 * hidden).to(dtype)) == []
    # An order of the sum that follows the size of the batch.
    rolled = lambda x: combine(x.unflatten(1, (4, hidden)).roll(len(x), 1), probabilities[:1].expand(len(x), 4))  # noqa: E731
    assert dependent_rows(rolled, torch.randn(50, 4 * hidden))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", [0, 1, 20] if INTERPRETED else [0, 1, 7, 40, 300, 3000])
def test_the_engines_form_gives_the_bits_of_the_learners(dtype, gated, n, monkeypatch):
    """One product over all experts, or one after the other; expert 3 has no row, and at 0 nobody has."""
    w13, w2 = (torch.randn(8, 96 if gated else 48, 64) / 8).to(dtype), (torch.randn(8, 64, 48) / 8).to(dtype)
    experts = torch.randint(0, 7, (n,)).sort().values
    experts[experts >= 3] += 1
    x, counts = torch.randn(n, 64).to(dtype), torch.bincount(experts, minlength=8).tolist()
    activation = silu_and_mul if gated else squared_relu
    wanted = grouped_linear(activation(grouped_linear(x, w13.unbind(), counts)), w2.unbind(), counts)
    f = lambda x, experts, w13=w13: mlp(x, experts, w13, w2, gated)  # noqa: E731
    for few in (0,) if INTERPRETED else (0, 2**20):  # of torch's form
        monkeypatch.setattr("megatron_rlzero.kernels.experts.reference.FEW", few)
        assert torch.equal(f(x, experts[:, None])[:, 0], wanted)
        order = torch.randperm(n)
        assert torch.equal(f(x[order], experts[order, None])[:, 0], wanted[order])
        # several of a token, some of them elsewhere
        several = torch.stack((experts, torch.full_like(experts, -1), experts.flip(0)), 1)
        found = f(x, several)
        assert torch.equal(found[:, 0], wanted)
        assert found[:, 1].eq(0).all()
        assert torch.equal(found[:, 2], f(x, several[:, 2:])[:, 0])
    assert n == 0 or not torch.equal(f(x, experts[:, None], w13 + 0.01)[:, 0], wanted)
