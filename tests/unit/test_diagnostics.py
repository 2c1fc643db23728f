"""Metrics of an update against hand-computed values, on empty sets, and against an enumerated KL."""

import numpy as np
import pytest

from megatron_rlzero import diagnostics
from megatron_rlzero.rollout import Rollout


def rollout(logprobs, versions, reward=0.0, finish="stop", prompt=2):
    """A response with ``prompt`` tokens before its action tokens."""
    n = len(logprobs)
    return Rollout(
        update=5,
        item=0,
        sample=0,
        tokens=np.zeros(prompt + n, dtype=np.int32),
        action_mask=np.array([False] * prompt + [True] * n),
        logprobs=np.array([0.0] * prompt + list(logprobs), dtype=np.float32),
        versions=np.array([-1] * prompt + list(versions), dtype=np.int32),
        reward=reward,
        finish_reason=finish,
    )


def padded(values, prompt=2, outside=0.0):
    return np.array([outside] * prompt + list(values), dtype=np.float32)


def test_all_metrics_of_a_small_update():
    rollouts = [
        rollout([-1.0, -2.0], [5, 5], reward=1.0),
        rollout([-0.5], [3], reward=0.0, finish="length"),
        rollout([], [], reward=0.0, finish="failed"),
    ]
    logprobs = [padded([-1.0, -1.5]), padded([-1.0]), padded([])]
    entropies = [padded([0.3, 0.6]), padded([0.9]), padded([])]
    metrics = diagnostics.update_metrics(rollouts, logprobs, entropies, version=5)
    d = np.array([0.0, 0.5, -0.5])
    w = np.exp(d)
    expected = {
        "reward/mean": 1 / 3,
        "reward/pass@1": 1 / 3,
        "response/length_mean": 1.0,
        "response/truncated_frac": 1 / 3,
        "response/failed_frac": 1 / 3,
        "response/action_tokens": 3.0,
        "lag/mean": 2 / 3,
        "lag/max": 2.0,
        "lag/p99": 2.0,
        "mismatch/tokens": 2.0,
        "mismatch/differing_frac": 0.5,
        "mismatch/abs_diff_max": 0.5,
        "mismatch/abs_diff_mean": 0.25,
        "rollout_kl/k1": 0.0,
        "rollout_kl/k2": (d**2).mean() / 2,
        "rollout_kl/k3": (w - 1 - d).mean(),
        "is/chi2": (w**2).mean() - 1,
        "is/renyi3": np.log((w**3).mean()) / 2,
        "is/ess": w.sum() ** 2 / (3 * (w**2).sum()),
        "is/ratio_max": np.exp(0.5),
        "entropy": 0.6,
    }
    assert metrics.keys() == expected.keys()
    assert all(type(value) is float for value in metrics.values())
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_values_outside_the_actions_do_not_count():
    rollouts = [rollout([-1.0], [5])]
    clean = diagnostics.update_metrics(rollouts, [padded([-1.1])], [padded([0.2])], 5)
    poisoned = diagnostics.update_metrics(
        rollouts, [padded([-1.1], outside=np.nan)], [padded([0.2], outside=np.nan)], 5
    )
    assert clean == poisoned
    assert clean != diagnostics.update_metrics(rollouts, [padded([-1.2])], [padded([0.2])], 5)


@pytest.mark.parametrize("rollouts", [[], [rollout([], [], finish="failed")]])
def test_no_action_token_gives_finite_values(rollouts):
    empty = [padded([]) for _ in rollouts]
    metrics = diagnostics.update_metrics(rollouts, empty, empty, version=2)
    assert all(np.isfinite(value) for value in metrics.values())
    zero = set(metrics) - {"response/failed_frac"}
    assert all(metrics[name] == 0 for name in zero)


def test_no_same_version_token_is_not_mistaken_for_agreement():
    metrics = diagnostics.update_metrics([rollout([-1.0], [4])], [padded([-3.0])], [padded([0.0])], 5)
    assert metrics["mismatch/tokens"] == 0
    assert metrics["mismatch/differing_frac"] == 0
    same = diagnostics.update_metrics([rollout([-1.0], [5])], [padded([-3.0])], [padded([0.0])], 5)
    assert (same["mismatch/tokens"], same["mismatch/differing_frac"]) == (1, 1)


def test_mismatch_metrics_are_those_of_the_update():
    rollouts = [rollout([-1.0, -2.0], [5, 4]), rollout([-1.0], [5])]
    logprobs = [padded([-1.5, -2.0]), padded([-1.0])]
    found = diagnostics.mismatch_metrics(rollouts, logprobs, 5)
    assert found.items() <= diagnostics.update_metrics(rollouts, logprobs, logprobs, 5).items()
    assert found["mismatch/differing_frac"] == 0.5
    assert diagnostics.mismatch_metrics(rollouts, logprobs, 4)["mismatch/differing_frac"] == 0


def test_one_ulp_and_the_sign_of_zero_are_seen():
    mu = np.array([-1.0, -0.0, -2.0], dtype=np.float32)
    pi = np.array([np.nextafter(np.float32(-1), np.float32(0)), 0.0, -2.0], dtype=np.float32)
    versions = np.array([1, 1, 1], dtype=np.int32)
    found = diagnostics.mismatch(pi, mu, versions, 1)
    assert found["mismatch/differing_frac"] == pytest.approx(2 / 3)
    assert found["mismatch/abs_diff_max"] == 2.0**-24
    assert diagnostics.mismatch(mu, mu, versions, 1)["mismatch/differing_frac"] == 0


def test_other_types_than_float32_are_refused():
    values = np.zeros(1)
    with pytest.raises(TypeError, match="logprobs is float64"):
        diagnostics.mismatch(values, values.astype(np.float32), np.zeros(1, np.int32), 0)


def test_estimates_match_the_enumerated_divergences():
    rng = np.random.default_rng(0)
    mu, pi = rng.dirichlet(np.ones(6) * 5), rng.dirichlet(np.ones(6) * 5)
    tokens = rng.choice(6, size=400_000, p=mu)
    d = np.log(pi / mu)[tokens]
    kl = (mu * np.log(mu / pi)).sum()
    estimates = diagnostics.rollout_kl(d)
    assert estimates["rollout_kl/k1"] == pytest.approx(kl, rel=0.02)
    assert estimates["rollout_kl/k3"] == pytest.approx(kl, rel=0.02)
    assert estimates["rollout_kl/k3"] != pytest.approx((pi * np.log(pi / mu)).sum(), rel=0.02)  # the other direction
    weights = diagnostics.importance(d)
    assert weights["is/chi2"] == pytest.approx((pi**2 / mu).sum() - 1, rel=0.03)
    assert weights["is/renyi3"] == pytest.approx(np.log((pi**3 / mu**2).sum()) / 2, rel=0.03)
    assert weights["is/ess"] == pytest.approx(1 / (1 + weights["is/chi2"]), rel=0.01)


def test_k3_of_tiny_ratios_is_not_lost_to_rounding():
    d = np.full(10, 1e-7)
    assert diagnostics.rollout_kl(d)["rollout_kl/k3"] == pytest.approx(5e-15, rel=1e-2)


def test_lag_p99_is_an_observed_lag():
    versions = np.array([10] * 985 + [7] * 14 + [2], dtype=np.int32)
    assert diagnostics.lag(versions, 10)["lag/p99"] == 3
    assert diagnostics.lag(versions[5:], 10)["lag/max"] == 8


def test_faults_name_the_response():
    good = rollout([-1.0], [5])
    with pytest.raises(ValueError, match=r"update 5, item 0, sample 0.*logprobs is nan at token 2"):
        diagnostics.update_metrics([good], [padded([np.nan])], [padded([0.0])], 5)
    with pytest.raises(ValueError, match=r"entropies has shape \(2,\) for 3 tokens"):
        diagnostics.update_metrics([good], [padded([0.0])], [padded([])], 5)
    with pytest.raises(ValueError, match="logprobs has 0 arrays for 1 responses"):
        diagnostics.update_metrics([good], [], [], 5)
    for version in (4, 5):
        if version == 4:
            with pytest.raises(ValueError, match="versions 5 to 5 in the update of version 4"):
                diagnostics.update_metrics([good], [padded([-1.0])], [padded([0.0])], version)
        else:
            diagnostics.update_metrics([good], [padded([-1.0])], [padded([0.0])], version)
    with pytest.raises(ValueError, match="versions -1"):
        diagnostics.update_metrics([rollout([-1.0], [-1])], [padded([-1.0])], [padded([0.0])], 5)
