"""The picture of a run is written, shows what the metrics hold, and refuses a run without an update."""

import json

import matplotlib.image
import numpy as np
import pytest

from megatron_rlzero.plot import moving_average, plot


def write(run_dir, lines):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def updates(k3):
    return [
        {"update": u, "reward/mean": 0.3 + u / 40, "rollout_kl/k3": k3(u), "lag/mean": 1.5, "lag/max": 2.0}
        for u in range(20)
    ]


def pixels(path):
    return matplotlib.image.imread(path)


def test_png_of_a_run(tmp_path):
    path = plot(write(tmp_path / "run", updates(lambda u: 1e-3 * (1 + u))))
    assert path == tmp_path / "run" / "plot.png"
    image = pixels(path)
    assert min(image.shape[:2]) > 500
    assert np.unique(image.reshape(-1, image.shape[-1]), axis=0).shape[0] > 20


@pytest.mark.parametrize("k3", [lambda u: 0.0, lambda u: max(0.0, 1e-4 * (u - 3)), lambda u: 1e-4])
def test_zero_divergence_is_drawn_without_a_warning(tmp_path, recwarn, k3):
    plot(write(tmp_path / "run", updates(k3)))
    assert not recwarn.list


def test_held_out_points_are_drawn_when_present(tmp_path):
    lines = updates(lambda u: 1e-3)
    without = pixels(plot(write(tmp_path / "run", lines)))
    again = pixels(plot(write(tmp_path / "run", lines)))
    evaluated = [{"update": 0, "eval/sampled": 0.3, "eval/greedy": 0.6}, *lines]
    with_points = pixels(plot(write(tmp_path / "run", evaluated)))
    assert np.array_equal(without, again)
    assert not np.array_equal(without, with_points)


def test_a_run_without_an_update_is_refused(tmp_path):
    with pytest.raises(ValueError, match="records no update yet"):
        plot(write(tmp_path / "run", [{"update": 0, "eval/sampled": 0.3}]))


def test_moving_average_looks_back_only():
    np.testing.assert_allclose(moving_average(np.array([1.0, 3.0, 5.0, 7.0]), 2), [1, 2, 4, 6])
    np.testing.assert_allclose(moving_average(np.array([1.0, 3.0]), 10), [1, 2])
