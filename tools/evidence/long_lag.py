"""Long asynchronous runs in one process: lags 2 and 64 by the project's rule, and a queue without a bound.

Usage: python -m tools.evidence.long_lag [--out DIR]. Kill it and start it again as you like: it goes on from its
checkpoints, and its CSV has the same bytes.

Three queues, each with a sampler that is aligned (kappa = 0: at equal weights its log-probs are the learner's to the
bit) and with noise on its logits (see dose_response.py); four seeds each, all at one learning rate:

- max_lag 2: 20,000 updates by the rule ``bound`` of rollouts.py; four tokens per response between two updates.
- max_lag 64: 6,000 updates by the same rule; one token per response between two updates, so that the learner is the
  slower side and nearly every token is about as old as it may be; a response has as many versions as tokens.
- first_finished: whatever finished first, from 20 batches in flight; a learner that waits for nothing else. Answers of
  2 to 16 tokens make ages differ; that its mean lag is at least MEAN_LAG is checked.

Ratios are of means over the last 500 updates to those over updates 500 to 1,000; of medians for entropy and norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.evidence import results, runs
from tools.evidence.runs import HELD_OUT, METRICS, Arm, Plan, Run

KAPPAS, SEEDS, RATE, BATCH, EVERY = (0.0, 0.2, 1.0), range(4), 1e-3, 32, 100
#: least mean lag of the queue without a bound
MEAN_LAG = 10.5
WINDOW, EARLY, LATE = 200, slice(500, 1000), slice(-500, None)
OF_WEIGHTS, OF_LAG = ("k3", "renyi3", "ess", "ratio_max"), ("lag_mean", "lag_max")
SHOWN = (*OF_WEIGHTS, "entropy", "grad_norm", "change", "pass", "length", "difficulty", *OF_LAG)
LARGEST = ("ratio_max", "lag_max")


def plans() -> dict[str, Plan]:
    arms = tuple(Arm(seed, kappa, RATE) for kappa in KAPPAS for seed in SEEDS)
    return {
        "max_lag 2": Plan(arms, 20_000, 3 * BATCH, "bound", ticks=4, batch=BATCH, every=EVERY),
        "max_lag 64": Plan(arms, 6_000, 65 * BATCH, "bound", ticks=1, batch=BATCH, every=EVERY),
        "first_finished": Plan(arms, 6_000, 20 * BATCH, "first_finished", batch=BATCH, every=EVERY),
    }


def rows(queue: str, run: Run) -> Iterator[tuple]:
    """One line per WINDOW updates of an arm: means; of LARGEST the largest, of k3 both; held-out pass@1 at its end."""
    for i, arm in enumerate(run.plan.arms):
        for end in range(WINDOW, run.plan.updates + 1, WINDOW):
            window = dict(zip(METRICS, run.log[end - WINDOW : end, i].numpy().T, strict=True))
            values = [float((np.max if name in LARGEST else np.mean)(window[name])) for name in SHOWN]
            held_out = float(run.held_out[end // EVERY, i, HELD_OUT.index("pass")])
            yield queue, arm.kappa, arm.seed, end, held_out, float(window["k3"].max()), *values


def arm_figures(log: NDArray, held_out: NDArray) -> dict[str, float]:
    """What is told of one arm, from its log [updates, METRICS] and its held-out pass@1 [evaluations]."""
    x = dict(zip(METRICS, log.T.astype(np.float64), strict=True))

    def ratio(name: str, mean=np.mean) -> float:
        return float(mean(x[name][LATE]) / mean(x[name][EARLY]))

    windows = x["pass"][: len(log) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1)
    return {
        "lag mean": float(x["lag_mean"].mean()),
        "lag max": float(x["lag_max"].max()),
        "k3 median": float(np.median(x["k3"])),
        "k3 peak/median": float(x["k3"].max() / np.median(x["k3"])),
        "Renyi-3 peak/median": float(x["renyi3"].max() / np.median(x["renyi3"])),
        "smallest ESS": float(x["ess"].min()),
        "largest weight": float(x["ratio_max"].max()),
        "KL last/first": ratio("k3"),
        "entropy last/first": ratio("entropy", np.median),
        "grad norm last/first": ratio("grad_norm", np.median),
        "weight change last/first": ratio("change"),
        "pass@1 in 0.4 to 0.7": float(((windows >= 0.4) & (windows <= 0.7)).mean()),
        "held-out first": float(held_out[0]),
        "held-out last": float(held_out[-5:].mean()),
    }


def summary(queue: str, run: Run) -> list[dict[str, object]]:
    """One entry per kappa: the median of every figure over the seeds, with the smallest and the largest."""
    log, held, entries = run.log.numpy(), run.held_out.numpy(), []
    for kappa in KAPPAS:
        arms = [i for i, arm in enumerate(run.plan.arms) if arm.kappa == kappa]
        figures = [arm_figures(log[:, i], held[:, i, HELD_OUT.index("pass")]) for i in arms]
        spread = {name: [float(f([g[name] for g in figures])) for f in (np.median, min, max)] for name in figures[0]}
        stopped = int((~run.learner.alive[arms]).sum())
        differing = float(log[:, arms, METRICS.index("differing")].max())
        probe = float(held[:, arms, HELD_OUT.index("differing")].max())
        entries.append(
            {"queue": queue, "kappa": kappa, "stopped": stopped, "differing": differing, "probe": probe} | spread
        )
    return entries


def draw(path: Path, found: dict[str, Run]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    shown = {"k3": "k3", "ratio_max": "largest weight", "entropy": "entropy", "pass": "pass@1 in training"}
    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown) + 1, len(found), sharex="col", sharey="row", squeeze=False)
    for column, (queue, run) in zip(axes.T, found.items(), strict=True):
        for i, arm in enumerate(run.plan.arms):
            colour = dict(zip(KAPPAS, (results.BLUE, results.ORANGE, results.GREEN), strict=True))[arm.kappa]
            style = {"color": colour, "linewidth": 0.7, "alpha": 0.8}
            label = f"kappa = {arm.kappa:g}" if arm.seed == SEEDS[0] else None
            for one, name in zip(column, shown, strict=False):
                values = run.log[:, i, METRICS.index(name)].numpy().reshape(-1, EVERY)
                values = (np.max if name in LARGEST else np.mean)(values, 1)
                one.plot(EVERY * np.arange(1, len(values) + 1), values, label=label, **style)
            held_out = run.held_out[:, i, HELD_OUT.index("pass")]
            column[-1].plot(EVERY * np.arange(len(held_out)), held_out, **style)
        column[0].set(title=queue, yscale="log")
        column[1].set_yscale("log")
        column[-1].set_xlabel("update")
    for one, label in zip(axes[:, 0], [*shown.values(), "held-out pass@1"], strict=True):
        one.set_ylabel(label)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"one process, a small policy; each line a seed, per {EVERY} updates", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    chosen = results.options("long_lag", __doc__)
    found = {}
    for queue, plan in plans().items():
        found[queue] = Run(plan)
        found[queue].run(chosen.out / f"{queue.replace(' ', '_')}.pt", chunk=500)
    entries = [entry for queue, run in found.items() for entry in summary(queue, run)]
    if min(e["lag mean"][1] for e in entries if e["queue"] == "first_finished") < MEAN_LAG:
        raise RuntimeError(f"first_finished has a mean lag below {MEAN_LAG}: more slots are needed")
    path = chosen.results / "long_lag"
    header = ("queue", "kappa", "seed", "update", "held_out", "k3_max", *SHOWN)
    lines = (row for queue, run in found.items() for row in rows(queue, run))
    results.write_csv(path.with_suffix(".csv"), header, lines)
    draw(path.with_suffix(".png"), found)
    queues = {q: {"settings": runs.settings(r.plan), "seconds": round(float(r.seconds), 1)} for q, r in found.items()}
    results.write_json(
        path.with_suffix(".json"),
        {"kappas": KAPPAS, "rate": RATE, "seeds": list(SEEDS), "clip": 1.0, "queues": queues, "summary": entries},
    )
    names = [name for name in entries[0] if isinstance(entries[0][name], list)]
    print(results.table(
        ["", *(f"{e['queue']}, kappa {e['kappa']:g}" for e in entries)],
        [[name, *("{:.3g} ({:.3g} to {:.3g})".format(*e[name]) for e in entries)] for name in names]
        + [[name, *(f"{e[name]:g}" for e in entries)] for name in ("stopped", "differing", "probe")],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
