"""The project's objectives at a lag of 8, in one process: what each learns, and at which learning rate it breaks.

Usage: python -m tools.evidence.objectives [--out DIR]. Kill it and start it again as you like. The policy, task,
curriculum and forward dtype of policy.py and runs.py; max_lag 8 by the project's rule with one token per response
between two updates, so that nearly every token is as old as it may be; eight prompts with four responses each per
update; the advantage is batch_mean, for grpo its own. No noise: learner and sampler differ by the weights' age alone.
Collapse as in dose_response.py: held-out pass@1 below half of its running maximum three times in a row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_rlzero.objectives import OBJECTIVES
from tools.evidence import results, runs
from tools.evidence.dose_response import outcomes
from tools.evidence.runs import HELD_OUT, METRICS, Arm, Plan, Run

RATES, SEEDS, LAG, BATCH, SAMPLES, EVERY = (1e-3, 3e-3, 1e-2), range(8), 8, 32, 4, 50
UPDATES, LATE = 3_000, 500


def plan(objective: str) -> Plan:
    arms = tuple(Arm(seed, 0.0, rate) for rate in RATES for seed in SEEDS)
    slots = (LAG + 1) * BATCH
    return Plan(arms, UPDATES, slots, ticks=1, batch=BATCH, every=EVERY, objective=objective, samples=SAMPLES)


def summary(objective: str, run: Run) -> list[dict[str, object]]:
    """One entry per learning rate: the median over the seeds with the smallest and the largest."""
    log, held_out, entries = run.log.numpy(), run.held_out.numpy()[..., HELD_OUT.index("pass")], []
    ended = outcomes(run)
    for rate in RATES:
        arms = [i for i, arm in enumerate(run.plan.arms) if arm.rate == rate]
        x = {name: log[:, arms, i].astype(np.float64) for i, name in enumerate(METRICS)}
        figures = {
            "held-out last": held_out[-5:, arms].mean(0),
            "k3 median": np.median(x["k3"], 0),
            "smallest ESS": x["ess"].min(0),
            "largest weight": x["ratio_max"].max(0),
            "entropy last": np.median(x["entropy"][-LATE:], 0),
            "pass@1 last": x["pass"][-LATE:].mean(0),
            "lag mean": x["lag_mean"].mean(0),
        }
        spread = {name: [float(f(values)) for f in (np.median, np.min, np.max)] for name, values in figures.items()}
        entries.append(
            {"objective": objective, "rate": rate, "collapsed": sum(ended[run.plan.arms[i]][1] for i in arms)} | spread
        )
    return entries


def draw(path: Path, found: dict[str, Run]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    colours = dict(zip(OBJECTIVES, (results.BLUE, results.GREEN, results.ORANGE, results.GREY), strict=True))
    for axis, rate in zip(figure.subplots(1, len(RATES), sharey=True), RATES, strict=True):
        for name, run in found.items():
            for i, arm in enumerate(run.plan.arms):
                if arm.rate == rate:
                    values = run.held_out[:, i, HELD_OUT.index("pass")]
                    label = name if arm.seed == SEEDS[0] else None
                    axis.plot(EVERY * np.arange(len(values)), values, color=colours[name], linewidth=0.7, label=label)
        axis.set(title=f"learning rate {rate:g}", xlabel="update")
        axis.set_ylabel("held-out pass@1" if rate == RATES[0] else "")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"one process, a small policy, max_lag {LAG}; each line a seed", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    chosen = results.options("objectives", __doc__)
    found = {}
    for name in OBJECTIVES:
        found[name] = Run(plan(name))
        found[name].run(chosen.out / f"{name}.pt", chunk=500)
    entries = [entry for name, run in found.items() for entry in summary(name, run)]
    path = chosen.results / "objectives"
    rows = (
        (name, arm.rate, arm.seed, EVERY * j, float(run.held_out[j, i, HELD_OUT.index("pass")]))
        for name, run in found.items()
        for i, arm in enumerate(run.plan.arms)
        for j in range(len(run.held_out))
    )
    results.write_csv(path.with_suffix(".csv"), ("objective", "rate", "seed", "update", "held_out"), rows)
    draw(path.with_suffix(".png"), found)
    settings = {n: {"settings": runs.settings(r.plan), "seconds": round(float(r.seconds), 1)} for n, r in found.items()}
    results.write_json(path.with_suffix(".json"), {"seeds": list(SEEDS), "arms": settings, "summary": entries})
    names = [name for name in entries[0] if isinstance(entries[0][name], list)]
    print(results.table(
        ["objective", "rate", "collapsed", *names],
        [[e["objective"], f"{e['rate']:g}", e["collapsed"], *("{:.3g} ({:.3g} to {:.3g})".format(*e[n]) for n in names)]
         for e in entries],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
