"""Advantage estimators against hand-computed values, and what they refuse."""

import numpy as np
import pytest

from megatron_rlzero.advantage import ADVANTAGES, GROUPED, compute

REWARDS = np.array([1, 0, 0, 1, 1, 1], dtype=np.float32)
GROUPS = np.array([7, 7, 7, 3, 3, 3])
ROOT2 = 2**0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1, 0, 0, 1, 1, 1]),
        ("batch_mean", [1 / 3, -2 / 3, -2 / 3, 1 / 3, 1 / 3, 1 / 3]),
        ("rloo", [1, -0.5, -0.5, 0, 0, 0]),
        ("grpo", [ROOT2, -1 / ROOT2, -1 / ROOT2, 0, 0, 0]),
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, 0, 0, 0]),
        ("reinforce_pp_baseline", [2, -1, -1, 0, 0, 0]),
    ],
)
def test_values(name, expected):
    advantages = compute(name, REWARDS, GROUPS)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)


def test_every_estimator_has_a_formula_and_a_source():
    for name, estimator in ADVANTAGES.items():
        assert estimator.__name__ == name
        assert "A_i =" in estimator.__doc__
        assert "Source:" in estimator.__doc__


def test_estimators_differ_from_each_other():
    values = [tuple(compute(name, REWARDS, GROUPS)) for name in ADVANTAGES]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("name", GROUPED)
def test_order_of_the_responses_does_not_matter(name):
    rewards = np.array([0.3, 0.9, 0.1, 0.4], dtype=np.float32)
    groups = np.array([0, 1, 0, 1])
    order = np.array([2, 3, 1, 0])
    shuffled = compute(name, rewards[order], groups[order])
    np.testing.assert_allclose(shuffled, compute(name, rewards, groups)[order], atol=1e-6)
    assert not np.allclose(compute(name, rewards, groups[[0, 0, 1, 1]]), compute(name, rewards, groups))


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline"])
def test_equal_rewards_give_zero_and_not_amplified_rounding(name):
    rewards = np.full(6, 0.1, dtype=np.float32)  # 0.1 * 3 / 3 is not 0.1 in every rounding
    assert (compute(name, rewards, GROUPS) == 0).all()
    rewards[0] = 0.2
    assert (compute(name, rewards, GROUPS) != 0).any()


def test_empty_update_with_batch_mean():
    assert compute("batch_mean", np.zeros(0), np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("name", GROUPED)
def test_group_of_one_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"group 5 .*samples_per_prompt"):
        compute(name, np.ones(3), np.array([4, 4, 5]))
    assert len(compute(name, np.ones(4), np.array([4, 4, 5, 5]))) == 4


def test_faults_are_named():
    with pytest.raises(ValueError, match=r"loop.advantage = ppo.*batch_mean"):
        compute("ppo", REWARDS, GROUPS)
    with pytest.raises(ValueError, match="reward 1 is nan"):
        compute("none", np.array([0, np.nan]), np.array([0, 1]))
    with pytest.raises(ValueError, match=r"shape \[B\]"):
        compute("none", REWARDS, GROUPS[:2])
