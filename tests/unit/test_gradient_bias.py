"""Statistics of gradients: no bias where there is none, the right one where there is, and errors that cover it."""

import numpy as np
import pytest

from tools.evidence.gradient_stack import BATCH, BATCHES, PROMPTS, SAMPLES, batches
from tools.evidence.gradient_statistics import Estimate, Groups, jackknife

PARAMETERS, GROUPS, PER_GROUP = 30, 8, 4
REFERENCE, SAME, OTHER, TWIN = range(4)


def experiment(generator, shift=0.3, noise=2.0):
    """Four arms: reference, one of its distribution, one that is off by ``shift`` norms, and that one's twin.

    The twin has the noise of OTHER and no shift. The true gradient has norm 1.
    """
    truth, direction = np.zeros(PARAMETERS), np.zeros(PARAMETERS)
    truth[0], direction[1] = 1.0, shift
    draws = generator.normal(size=(3, GROUPS, PER_GROUP, PARAMETERS)) * noise / np.sqrt(PARAMETERS)
    arms = truth + np.stack([draws[0], draws[1], draws[2] + direction, draws[2]])
    means = arms.mean(2).reshape(-1, PARAMETERS)
    gram = (means @ means.T).reshape(4, GROUPS, 4, GROUPS)
    return Groups(gram, (arms**2).sum(-1).mean(-1)), means.reshape(4, GROUPS, PARAMETERS)


def test_cross_is_the_mean_of_products_of_different_groups():
    groups, means = experiment(np.random.default_rng(0))
    for i, j in ((0, 0), (0, 2), (3, 1)):
        pairs = [means[i, k] @ means[j, m] for k in range(GROUPS) for m in range(GROUPS) if k != m]
        assert groups.cross(groups.arm(i), groups.arm(j)) == pytest.approx(np.mean(pairs))
    difference = groups.arm(OTHER) - groups.arm(TWIN)
    assert groups.cross(difference, difference) == pytest.approx(0.09)


def test_estimates_are_unbiased_and_the_plain_ones_are_not():
    found, plain = [], []
    for seed in range(2000):
        groups, means = experiment(np.random.default_rng(seed))
        r = groups.arm(REFERENCE)
        found.append(
            [
                groups.cross(r, r),
                *(groups.cross(groups.arm(i) - r, groups.arm(i) - r) for i in (SAME, OTHER)),
                groups.variance(OTHER),
            ]
        )
        plain.append(((means[SAME].mean(0) - means[REFERENCE].mean(0)) ** 2).sum())
    error = np.std(found, axis=0) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - [1.0, 0.0, 0.09, 4.0]) < 4 * error).all()
    assert np.mean(plain) > 0.2  # squared noise of two means of 32 batches: 2 * 4 / 32


def test_jackknife_error_is_the_spread_over_repetitions():
    statistics = {
        "bias": lambda g: g.distance(OTHER, REFERENCE, REFERENCE),
        "cosine": lambda g: g.cosine(OTHER, REFERENCE),
        "variance": lambda g: g.relative_variance(OTHER, REFERENCE),
    }
    for statistic in statistics.values():
        estimates = [jackknife(experiment(np.random.default_rng(seed), noise=1.0)[0], statistic) for seed in range(300)]
        spread = np.std([e.value for e in estimates])
        assert np.sqrt(np.mean([e.error**2 for e in estimates])) == pytest.approx(spread, rel=0.35)


def test_paired_difference_is_found_where_the_unpaired_one_is_lost_in_noise():
    groups, _ = experiment(np.random.default_rng(3), shift=0.05)
    unpaired = jackknife(groups, lambda g: g.distance(OTHER, REFERENCE, REFERENCE))
    paired = jackknife(groups, lambda g: g.distance(OTHER, TWIN, REFERENCE))
    assert not unpaired.found and paired.found
    assert paired.error < 0.1 * unpaired.error
    same = jackknife(groups, lambda g: g.distance(SAME, REFERENCE, REFERENCE))
    assert not same.found and same.at_most > 0


def test_bounds_of_a_squared_length():
    assert Estimate(0.04, 0.01).found and Estimate(0.04, 0.01).root == pytest.approx(0.2)
    negative = Estimate(-0.01, 0.01)
    assert not negative.found and negative.root == 0.0 and negative.at_most == pytest.approx(np.sqrt(0.01645))


def test_batches_hold_each_response_once_and_no_prompt_twice():
    class Response:
        def __init__(self, item, sample):
            self.item, self.sample = item, sample

    rollouts = [Response(item, sample) for item in range(PROMPTS) for sample in range(SAMPLES)]
    found = list(batches(rollouts, seed=1, piece=3))
    assert len(found) == BATCHES and {len(batch) for batch in found} == {BATCH}
    assert all(len({r.item for r in batch}) == BATCH for batch in found)
    assert len({id(r) for batch in found for r in batch}) == len(rollouts)
    same = list(batches(rollouts[::-1], seed=1, piece=3))
    other = list(batches(rollouts, seed=1, piece=4))
    keys = lambda cut: [[(r.item, r.sample) for r in batch] for batch in cut]  # noqa: E731
    assert keys(found) == keys(same) and keys(found) != keys(other)
    with pytest.raises(ValueError, match="different responses"):
        list(batches([*rollouts[:-1], rollouts[0]], seed=1, piece=0))
