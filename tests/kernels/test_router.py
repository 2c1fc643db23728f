"""Router: float64 values and gradients, the lowest expert id on ties, fp32 whatever comes in, bits of a row."""

import pytest
import torch

from megatron_rlzero.kernels.router import gate, top_k
from tests.kernels.checks import DTYPES, FP32, INTERPRETED, dependent_rows, error, errors, tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_fp32(dtype):
    x, weight = torch.randn(33, 96).to(dtype), torch.randn(7, 96).to(dtype)
    logits = gate(x, weight)
    assert logits.dtype == FP32
    assert error(logits, x.double() @ weight.double().T) < tolerance(FP32)
    # Its gradients return to the dtype of the model with one rounding.
    assert max(errors(gate, lambda a, w: a @ w.T, (x, weight))) < tolerance(dtype)
    rounded = (x.bfloat16() @ weight.bfloat16().T).float()
    assert error(rounded, x.double() @ weight.double().T) > tolerance(FP32)


@pytest.mark.cpu
def test_a_bf16_gate_would_choose_other_experts():
    x, weight = torch.randn(500, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    chosen = top_k(gate(x, weight), 8, True)[1]
    assert not torch.equal(top_k((x @ weight.T).float(), 8, True)[1], chosen)


def routed(experts, k, renormalise, scaling):
    """float64 probabilities of given experts."""

    def f(logits):
        p = logits.softmax(-1).gather(1, experts)
        return p / p.sum(-1, keepdim=True) * scaling if renormalise else p * scaling

    return f


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "count", "k"), [(1, 4, 1), (5, 7, 2), (33, 64, 8), (3, 4, 4)])
def test_probabilities_and_gradient(tokens, count, k, renormalise):
    logits = torch.randn(tokens, count) * 2
    probabilities, experts = top_k(logits, k, renormalise, 2.5)
    assert probabilities.dtype == FP32
    assert experts.dtype == torch.int64
    assert (experts.diff(dim=-1) > 0).all()
    best = logits.double().sort(descending=True).indices[:, :k]
    assert torch.equal(experts, best.sort(-1).values)
    f = lambda x: top_k(x, k, renormalise, 2.5)[0]  # noqa: E731
    wanted = routed(experts, k, renormalise, 2.5)
    if count == k or k == 1:  # the gradient is zero but for rounding where the sum is a constant
        assert error(probabilities, wanted(logits.double())) < tolerance(FP32)
    else:
        assert max(errors(f, wanted, (logits,))) < tolerance(FP32)
    if renormalise:
        torch.testing.assert_close(probabilities.sum(-1), torch.full((tokens,), 2.5))
    if 1 < k < count:
        assert error(probabilities, routed(experts, k, not renormalise, 2.5)(logits.double())) > 1e-3


TIES = [
    ([0.0] * 8, [0, 1, 2]),
    ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 1.0], [1, 3, 5]),
    ([3.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [0, 2, 3]),
    ([-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 5.0], [0, 1, 7]),
    ([0.0, -0.0, -5.0, -5.0, 0.0, -5.0, -5.0, -0.0], [0, 1, 4]),
]


@pytest.mark.parametrize(("logits", "wanted"), TIES)
def test_ties_take_the_lowest_ids(logits, wanted):
    for tokens in (1, 33):
        assert top_k(torch.tensor([logits]).expand(tokens, 8), 3, True)[1].tolist() == [wanted] * tokens


def test_ties_among_many_experts_take_the_lowest_ids():
    logits = torch.randint(0, 3, (200, 128)).float()
    experts = top_k(logits, 8, True)[1]
    for row, chosen in zip(logits.tolist(), experts.tolist(), strict=True):
        assert chosen == sorted(sorted(range(128), key=lambda e: (-row[e], e))[:8])
    assert not torch.equal(torch.topk(logits, 8).indices.sort(-1).values, experts)


@pytest.mark.parametrize("count", [4, 7, 60, 128])
def test_rows_do_not_depend_on_the_batch(count):
    for renormalise in (True, False):
        f = lambda x, r=renormalise: torch.cat(top_k(x, 4, r), 1)  # noqa: E731
        # Noise and NaN in the other rows give them other experts, and this row the same bits.
        assert dependent_rows(f, torch.randn(50, count)) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [32, 127, 512])
def test_gate_rows_do_not_depend_on_the_batch(dtype, hidden):
    weight = torch.randn(60, hidden).to(dtype)
    assert dependent_rows(lambda x: gate(x, weight), torch.randn(50, hidden).to(dtype)) == []


@pytest.mark.cpu
def test_scores_of_the_whole_batch_are_noticed():
    """A softmax shifted by the largest logit of the batch, and not of the row, is the same but for its bits."""
    shifted = lambda x: (x - x.nan_to_num().max()).softmax(-1)  # noqa: E731
    assert dependent_rows(shifted, torch.randn(50, 60))


def choose(logits, bias, k, groups, kept):
    """Chosen ids of each row by loops over float64 scores, the lowest id on ties."""
    scores = torch.sigmoid(logits.double()) + bias.double()
    size, chosen = scores.shape[1] // groups, []
    for row in scores.tolist():
        totals = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-totals[g], g))[:kept]
        ids = [e for e in range(len(row)) if e // size in best]
        chosen.append(sorted(sorted(ids, key=lambda e: (-row[e], e))[:k]))
    return torch.tensor(chosen)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "count", "k", "groups", "kept"),
    [(33, 16, 4, 1, 1), (5, 16, 3, 4, 2), (200, 64, 6, 8, 4), (1, 8, 2, 2, 1)],
)
def test_sigmoid_scores_with_a_bias_and_groups(renormalise, tokens, count, k, groups, kept):
    logits, bias = torch.randn(tokens, count) * 2, torch.randn(count)
    bias.requires_grad_()
    f = lambda x, b=bias: top_k(x, k, renormalise, 2.5, True, b, groups, kept)  # noqa: E731
    probabilities, experts = f(logits)
    assert probabilities.dtype == FP32
    assert not probabilities.requires_grad
    assert torch.equal(experts, choose(logits, bias.detach(), k, groups, kept))

    def wanted(x):
        p = torch.sigmoid(x).gather(1, experts)
        return (p / (p.sum(-1, keepdim=True) + 1e-20) if renormalise else p) * 2.5

    assert max(errors(lambda x: f(x)[0], wanted, (logits,))) < tolerance(FP32)
    if tokens > 5:
        assert not torch.equal(f(logits, None)[1], experts)
        assert groups == 1 or not torch.equal(top_k(logits, k, renormalise, 2.5, True, bias)[1], experts)
    biased = (torch.sigmoid(logits) + bias.detach()).gather(1, experts)
    assert error(probabilities, biased * 2.5) > 1e-3


def test_equal_groups_and_experts_take_the_lowest_ids():
    for tokens in (1, 33):
        logits = torch.zeros(tokens, 12)
        assert top_k(logits, 3, True, sigmoid=True, groups=4, group_top_k=2)[1].tolist() == [[0, 1, 2]] * tokens
        logits[:, 9:] = 1.0
        assert top_k(logits, 4, True, sigmoid=True, groups=4, group_top_k=2)[1].tolist() == [[0, 9, 10, 11]] * tokens


def test_sigmoids_far_out_are_finite():
    logits = torch.tensor([[-1e4, -200.0, -89.0, 1e4]], requires_grad=True)
    for k in (2, 4):
        p = top_k(logits, k, True, sigmoid=True)[0]
        assert bool(p.isfinite().all())
        assert bool(torch.autograd.grad(p[0, 0], logits)[0].isfinite().all())
    assert top_k(torch.full((1, 4), -1e4), 2, True, sigmoid=True)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("count", [8, 60, 128])
def test_rows_of_sigmoid_scores_do_not_depend_on_the_batch(count):
    bias = torch.randn(count)
    f = lambda x: torch.cat(top_k(x, 4, True, 1.0, True, bias, 4, 2), 1)  # noqa: E731
    assert dependent_rows(f, torch.randn(50, count)) == []
    assert INTERPRETED or dependent_rows(torch.sigmoid, torch.randn(50, 125))


@pytest.mark.parametrize(("k", "groups", "kept"), [(2, 3, 1), (2, 8, 4), (5, 2, 1), (2, 2, 3), (2, 2, 0)])
def test_groups_that_do_not_fit_are_refused(k, groups, kept):
    with pytest.raises(ValueError, match=f"top-{k} of 8 experts in the best {kept} of {groups} groups"):
        top_k(torch.zeros(2, 8), k, True, sigmoid=True, groups=groups, group_top_k=kept)
