"""What token importance sampling corrects and what it does not: the enumerated tree of ``theory``, block by block."""

import pytest
import torch

from megatron_rlzero.theory import Tree

TREE = Tree()
P, Q = TREE.policy, TREE.sampler
true, token_is, sequence_is, uncorrected = TREE.true, TREE.token_is, TREE.sequence_is, TREE.uncorrected
gradients, error = TREE.gradients, TREE.error


def block_errors(objective, sampler):
    """Relative error of the gradient by the first step's and by the second step's logits."""
    pairs = zip(gradients(objective, sampler), gradients(true, sampler), strict=True)
    return [((found - wanted).norm() / wanted.norm()).item() for found, wanted in pairs]


@pytest.mark.parametrize("objective", [token_is, sequence_is, uncorrected])
def test_on_policy_all_are_exact(objective):
    assert error(objective, P) < 1e-14


def test_sequence_is_is_exact_whatever_the_sampler():
    assert error(sequence_is, Q) < 1e-14


def test_token_is_is_biased_and_no_correction_is_worse():
    token, none = error(token_is, Q), error(uncorrected, Q)
    print(f"relative gradient error: token IS {token:.3f}, uncorrected {none:.3f}")
    assert 0.05 < token < 0.5 * none


def test_last_step_is_exact_at_a_fixed_history():
    """Only the last step's sampler differs: its block is exact; the first step's returns still come from q."""
    first, second = block_errors(token_is, (P[0], Q[1]))
    assert second < 1e-14
    assert first > 0.05
    assert block_errors(uncorrected, (P[0], Q[1]))[1] > 0.05


def test_each_history_is_exact_up_to_how_often_it_is_visited():
    """A differing first step weights the second step's gradient at history h by q(h) / p(h), and nothing else."""
    sampler = (Q[0], Q[1])
    found, wanted = gradients(token_is, sampler)[1], gradients(true, sampler)[1]
    visits = (Q[0].softmax(-1) / P[0].softmax(-1))[:, None]
    torch.testing.assert_close(found, wanted * visits, rtol=1e-12, atol=1e-15)
    assert not torch.allclose(found, wanted, rtol=1e-2)


def test_differing_prefixes_bias_the_later_step():
    """Only the first step's sampler differs: the first block is exact, the second is not."""
    first, second = block_errors(token_is, (Q[0], P[1]))
    assert first < 1e-14
    assert second > 0.05


def test_weight_form_and_score_form_have_the_same_gradient():
    """grad w = w * grad log p, so -sg(w) A log p has the loss's gradient and another value."""

    def score_form(p1, p2, q1, q2):
        return -(q1 * q2 * Tree.reward * ((p1 / q1).detach() * p1.log() + (p2 / q2).detach() * p2.log())).sum() / 2

    for found, wanted in zip(gradients(score_form, Q), gradients(token_is, Q), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    for found, other in zip(gradients(uncorrected, Q), gradients(token_is, Q), strict=True):
        assert not torch.allclose(found, other, rtol=1e-2)
