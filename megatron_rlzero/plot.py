"""The picture of a run: reward with held-out accuracy, KL and lag over the updates, from metrics.jsonl to a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rlzero.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "plot.png"
#: updates in the moving average of the reward
WINDOW = 10
INK, BLUE, ORANGE, GREEN, GREY = "#222222", "#2a6fbb", "#d9730d", "#2e8b57", "#9aa5b1"


def plot(run_dir: str | Path) -> Path:
    """Writes plot.png into ``run_dir`` and returns its path.

    Raises:
        FileNotFoundError, ValueError: see ``read_metrics``.
        ValueError: no update has been recorded yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    lines = read_metrics(run_dir)
    if not any("reward/mean" in line for line in lines):
        raise ValueError(f"{run_dir}: metrics.jsonl records no update yet; plot it later")
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    reward, divergence, age = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1.2, 1))
    _reward(reward, lines)
    _divergence(divergence, lines)
    _age(age, lines)
    for axes in (reward, divergence, age):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e9ec", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=9)
        axes.yaxis.label.set_color(INK)
    age.set_xlabel("update", color=INK)
    age.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels()
    figure.suptitle(Path(run_dir).resolve().name, x=0.02, ha="left", fontsize=12, color=INK)
    path = Path(run_dir) / PLOT_FILE
    figure.savefig(path, dpi=150)
    return path


def _series(lines: list[dict[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(updates, values) of the lines that have the metric."""
    points = [(line["update"], line[name]) for line in lines if name in line]
    return np.array([update for update, _ in points]), np.array([value for _, value in points])


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to window - 1 before it; [n] to [n]."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def _reward(axes: Axes, lines: list[dict[str, float]]) -> None:
    updates, values = _series(lines, "reward/mean")
    axes.plot(updates, values, color=BLUE, alpha=0.3, linewidth=1, label="training batch")
    axes.plot(updates, moving_average(values, WINDOW), color=BLUE, linewidth=2, label=f"mean of {WINDOW} updates")
    for name, colour, marker, label in (
        ("eval/sampled", ORANGE, "o", "held-out, sampled"),
        ("eval/greedy", GREEN, "s", "held-out, greedy"),
    ):
        at, accuracy = _series(lines, name)
        if len(at):
            axes.plot(at, accuracy, color=colour, marker=marker, markersize=5, linewidth=1, ls=":", label=label)
    axes.set_ylabel("reward")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="best")


def _divergence(axes: Axes, lines: list[dict[str, float]]) -> None:
    updates, values = _series(lines, "rollout_kl/k3")
    axes.plot(updates, values, color=BLUE, linewidth=1.5)
    if (values > 0).all():
        axes.set_yscale("log")
    elif (values > 0).any():  # equal bits give exactly 0, which a log axis cannot show
        axes.set_yscale("symlog", linthresh=values[values > 0].min())
    axes.set_ylabel("KL(rollout, learner), k3")


def _age(axes: Axes, lines: list[dict[str, float]]) -> None:
    updates, largest = _series(lines, "lag/max")
    axes.plot(updates, largest, color=GREY, linewidth=1, drawstyle="steps-mid", label="largest")
    axes.plot(*_series(lines, "lag/mean"), color=BLUE, linewidth=1.5, label="mean")
    axes.set_ylabel("lag (versions)")
    top = max(1, *largest)
    axes.set_ylim(-0.08 * top, 1.15 * top)  # a synchronous run's line lies at 0, clear of the axis
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="best")
