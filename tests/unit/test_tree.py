"""What token importance sampling corrects and what it does not: a two-step decision tree, enumerated in float64.

The loss is the objective's, E_q[-(1/T) sum_t A w_t] with T = 2 and w_t = p(a_t|h_t) / q(a_t|h_t); its gradient goes
through w alone. It is compared, block by block, with the gradient of the true objective -E_p[A] / T.
"""

import pytest
import torch

ACTIONS = 3
REWARD = torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.7, 0.0], [0.1, 0.0, 0.9]], dtype=torch.float64)


def policy(seed):
    """Logits of the first step [A] and of the second step for each first action [A, A]."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(ACTIONS, generator=generator, dtype=torch.float64)
    second = torch.randn(ACTIONS, ACTIONS, generator=generator, dtype=torch.float64)
    return first, second


P, Q = policy(0), tuple(p + noise for p, noise in zip(policy(0), policy(1), strict=True))


def gradients(objective, sampler):
    """Gradient of ``objective`` by the logits of p, as (first step [A], second step [A, A])."""
    logits = tuple(x.clone().requires_grad_() for x in P)
    p1, p2 = (x.softmax(-1) for x in logits)
    q1, q2 = (x.softmax(-1) for x in sampler)
    return torch.autograd.grad(objective(p1[:, None], p2, q1[:, None], q2), logits)


def true(p1, p2, q1, q2):
    return -(p1 * p2 * REWARD).sum() / 2


def token_is(p1, p2, q1, q2):
    return -(q1 * q2 * REWARD * (p1 / q1 + p2 / q2)).sum() / 2


def sequence_is(p1, p2, q1, q2):
    return -(q1 * q2 * REWARD * (p1 * p2) / (q1 * q2)).sum() / 2


def uncorrected(p1, p2, q1, q2):
    return -(q1 * q2 * REWARD * (p1.log() + p2.log())).sum() / 2


def error(objective, sampler):
    """Relative error of the whole gradient."""
    found, wanted = (torch.cat([g.flatten() for g in gradients(f, sampler)]) for f in (objective, true))
    return ((found - wanted).norm() / wanted.norm()).item()


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
        return -(q1 * q2 * REWARD * ((p1 / q1).detach() * p1.log() + (p2 / q2).detach() * p2.log())).sum() / 2

    for found, wanted in zip(gradients(score_form, Q), gradients(token_is, Q), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    for found, other in zip(gradients(uncorrected, Q), gradients(token_is, Q), strict=True):
        assert not torch.allclose(found, other, rtol=1e-2)
