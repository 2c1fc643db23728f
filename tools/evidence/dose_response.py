"""Dose and response in one process: how much noise on the sampler's logits a learning rate survives.

Usage: python -m tools.evidence.dose_response [--out DIR]. Kill it and start it again as you like: it goes on from its
checkpoint, and its CSV has the same bytes.

The sampler draws from softmax(logits + kappa n), n standard normal and fresh for each token and entry of the
vocabulary; mu is that distribution's log-prob, so that the importance weight is exact at a fixed history. Nothing else
is between sampler and learner: lag 0, and at kappa = 0 both have the same bits. Every kappa, learning rate and seed is
a run of 1,500 updates; one arm more is without gradient clipping, at RATES[MIDDLE]. Collapse: see survival.py. A
learning rate is stable at a kappa if at most ALLOWED of the seeds collapse at it and at each smaller one.

Noise also spoils what the sampler writes, and so makes the curriculum choose shorter prompts, which is another way for
held-out accuracy to fall. The control has prompts of a fixed difficulty: CONTROL, 500 updates.

The line of the theory is that of theory.Gaussian, 2 / V(kappa), scaled to agree at kappa = 0: a Gaussian policy, plain
steps, a sampler that is off by kappa standard deviations of the action. That kappa is not the logits' one; so it is
drawn twice, once at the logits' kappa and once at the kappa that has the same effective sample size, e^(-kappa^2).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import inf, log, sqrt
from pathlib import Path

import numpy as np

from megatron_rlzero.theory import Gaussian
from tools.evidence import results, runs, survival
from tools.evidence.runs import FIRST, HELD_OUT, METRICS, Arm, Plan, Run

KAPPAS = (0.0, 0.25, 0.5, 1.0, 1.5)
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)
SEEDS = range(8)
UPDATES, EVERY, BATCH = 1500, 50, 32
CONTROL, CONTROL_UPDATES = (0.0, 1.0, 1.5), 500
MIDDLE, ALLOWED = 2, 1
#: largest log-prob differences of stock kernels at equal weights, fp32: of the quick start's hybrid, by probe with
#: kernels=stock as in examples/nemotron_omni/README.md, and of the quick start with experts, as README.md prints it
STOCK = {"hybrid": 5.06e-3, "experts": 2.86e-6}
COLUMNS = ("largest stable", "theory", "theory, same ESS", "ESS", "rms log-ratio", "log-rank chi2", "p")
SHOWN = ("pass", "difficulty", "k3", "ess", "ratio_max", "grad_norm", "entropy")


def plan() -> Plan:
    arms = [Arm(seed, kappa, rate) for kappa in KAPPAS for rate in RATES for seed in SEEDS]
    arms += [Arm(seed, kappa, RATES[MIDDLE], inf) for kappa in KAPPAS for seed in SEEDS]
    return Plan(tuple(arms), UPDATES, slots=BATCH, batch=BATCH, every=EVERY)


def control() -> Plan:
    arms = tuple(Arm(seed, kappa, rate) for kappa in CONTROL for rate in RATES for seed in SEEDS)
    return Plan(arms, CONTROL_UPDATES, slots=BATCH, batch=BATCH, every=EVERY, gain=0.0)


def outcomes(run: Run) -> dict[Arm, tuple[int, bool]]:
    """(update of the collapse or of the end, whether it collapsed) of every arm."""
    held, log_ = run.held_out[..., HELD_OUT.index("pass")].numpy(), run.log.numpy()
    finite = np.isfinite(log_[..., [METRICS.index("loss"), METRICS.index("grad_norm")]]).all(-1)
    return {arm: survival.collapse(held[:, i], run.plan.every, finite[:, i]) for i, arm in enumerate(run.plan.arms)}


def group(found: dict[Arm, tuple[int, bool]], kappa: float, rate: float, clip: float = 1.0) -> survival.Group:
    pairs = [found[Arm(seed, kappa, rate, clip)] for seed in SEEDS]
    return np.array([float(time) for time, _ in pairs]), np.array([event for _, event in pairs])


def collapses(found: dict[Arm, tuple[int, bool]], kappa: float, rate: float) -> str:
    """The updates at which seeds collapsed, in order."""
    times, events = group(found, kappa, rate)
    return " ".join(f"{time:.0f}" for time in sorted(times[events]))


def rows(run: Run) -> Iterator[tuple]:
    """One line per evaluation of an arm: means over the updates since the one before, the largest of ratio_max."""
    every = run.plan.every
    for i, arm in enumerate(run.plan.arms):
        for e in range(1, len(run.held_out)):
            window = dict(zip(METRICS, run.log[(e - 1) * every : e * every, i].numpy().T, strict=True))
            values = [float((np.max if name == "ratio_max" else np.mean)(window[name])) for name in SHOWN]
            yield (
                int(run.plan.gain > 0),
                arm.kappa,
                arm.rate,
                arm.clip,
                arm.seed,
                e * every,
                float(run.held_out[e, i, 0]),
                *values,
            )


def first_window(run: Run, kappa: float, name: str) -> float:
    """Mean of a metric over the first EVERY updates at the smallest learning rate: the noise on the first policy."""
    arms = [i for i, arm in enumerate(run.plan.arms) if (arm.kappa, arm.rate) == (kappa, RATES[0])]
    return float(run.log[:EVERY, arms, METRICS.index(name)].mean())


def summary(run: Run) -> list[dict[str, object]]:
    """One entry per kappa."""
    found, entries = outcomes(run), []
    stable = {}
    for kappa in KAPPAS:
        collapsed = [int(group(found, kappa, rate)[1].sum()) for rate in RATES]
        below = [rate for i, rate in enumerate(RATES) if max(collapsed[: i + 1]) <= ALLOWED]
        stable[kappa] = below[-1] if below else None
        ess = first_window(run, kappa, "ess")
        same_ess = sqrt(max(0.0, -log(ess)))
        chi2, p = survival.log_rank((group(found, 0.0, rate), group(found, kappa, rate)) for rate in RATES)
        entries.append(
            {
                "kappa": kappa,
                "collapsed": dict(zip(map(str, RATES), collapsed, strict=True)),
                "collapsed_without_clipping": int(group(found, kappa, RATES[MIDDLE], inf)[1].sum()),
                "collapsed_at": {str(rate): collapses(found, kappa, rate) for rate in RATES},
                "stable": stable[kappa],
                "theory": Gaussian(kappa).stable / Gaussian(0.0).stable,
                "theory_at_same_ess": Gaussian(same_ess).stable / Gaussian(0.0).stable,
                "log_ratio_rms": first_window(run, kappa, "log_ratio_rms"),
                "ess": ess,
                "log_rank_chi2": chi2,
                "log_rank_p": p,
            }
        )
    return entries


def draw(path: Path, entries: list[dict]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    line, grid = figure.subplots(1, 2)
    kappas = np.array([entry["kappa"] for entry in entries])
    base = entries[0]["stable"]
    shown = [entry["stable"] or np.nan for entry in entries]
    line.plot(kappas, shown, "o-", color=results.BLUE, label="largest stable learning rate of the grid")
    none = [entry["kappa"] for entry in entries if entry["stable"] is None]
    line.plot(
        none, [RATES[0]] * len(none), "v", color=results.BLUE, fillstyle="none", label="none of the grid is stable"
    )
    if base:
        fine = np.concatenate([[0.0], np.geomspace(1e-4, KAPPAS[-1], 200)])
        curve = [base * Gaussian(k).stable / Gaussian(0.0).stable for k in fine]
        line.plot(fine, curve, color=results.ORANGE, label="theory, 2 / V(kappa), scaled at 0")
        same = [base * entry["theory_at_same_ess"] for entry in entries]
        line.plot(kappas, same, "s:", color=results.GREEN, markersize=4, label="theory at the kappa of the same ESS")
    per_kappa = entries[1]["log_ratio_rms"] / entries[1]["kappa"]
    for name, difference in STOCK.items():
        line.axvline(difference / per_kappa, color=results.GREY, linewidth=1, linestyle="--")
        line.annotate(f"stock, {name}", (difference / per_kappa, 0.02), xycoords=("data", "axes fraction"), rotation=90,
                      fontsize=7, ha="right", va="bottom", color=results.INK)  # fmt: skip
    line.set_xscale("symlog", linthresh=1e-6)
    line.set_xlim(-3e-7, 3.0)
    line.set_xticks([0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["0", "1e-5", "1e-4", "1e-3", "0.01", "0.1", "1"])
    line.set(xlabel="kappa, logit noise of the sampler", ylabel="learning rate", yscale="log")
    line.set_ylim(RATES[0] / 3, RATES[-1] * 2)
    line.legend(frameon=False, fontsize=8)
    counts = np.array([[*entry["collapsed"].values(), entry["collapsed_without_clipping"]] for entry in entries]).T
    grid.imshow(counts, origin="lower", cmap="Oranges", vmin=0, vmax=len(SEEDS), aspect="auto")
    for (y, x), count in np.ndenumerate(counts):
        grid.text(x, y, count, ha="center", va="center", fontsize=9)
    grid.set_xticks(range(len(KAPPAS)), [f"{k:g}" for k in KAPPAS])
    grid.set_yticks(range(len(RATES) + 1), [*(f"{r:g}" for r in RATES), f"{RATES[MIDDLE]:g}\nunclipped"])
    grid.set(xlabel="kappa", title=f"runs of {len(SEEDS)} that collapsed within {UPDATES:,} updates")
    figure.suptitle("one process, a small policy, lag 0", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    chosen = results.options("dose_response", __doc__)
    run, fixed = Run(plan()), Run(control())
    run.run(chosen.out / "dose_response.pt")
    fixed.run(chosen.out / "fixed_difficulty.pt")
    entries, found = summary(run), outcomes(fixed)
    counts = {str(k): {str(rate): int(group(found, k, rate)[1].sum()) for rate in RATES} for k in CONTROL}
    path = chosen.results / "dose_response"
    header = ("curriculum", "kappa", "rate", "clip", "seed", "update", "held_out", *SHOWN)
    results.write_csv(path.with_suffix(".csv"), header, chain(rows(run), rows(fixed)))
    draw(path.with_suffix(".png"), entries)
    results.write_json(
        path.with_suffix(".json"),
        {
            "kappas": KAPPAS,
            "rates": RATES,
            "seeds": list(SEEDS),
            "updates": UPDATES,
            "settings": runs.settings(run.plan),
            "collapse": {"below": survival.HALF, "evaluations": survival.PATIENCE, "every": EVERY, "allowed": ALLOWED},
            "probe_tokens_differing": float(run.held_out[..., HELD_OUT.index("differing")].max()),
            "seconds": round(float(run.seconds + fixed.seconds), 1),
            "summary": entries,
            "fixed_difficulty": {"updates": CONTROL_UPDATES, "longest": FIRST, "collapsed": counts},
        },
    )
    base = entries[0]["stable"] or RATES[0]
    print(
        results.table(
            ["kappa", *(f"{rate:g}" for rate in RATES), f"{RATES[MIDDLE]:g} unclipped", *COLUMNS],
            [
                [
                    f"{e['kappa']:g}",
                    *e["collapsed"].values(),
                    e["collapsed_without_clipping"],
                    e["stable"] or f"< {RATES[0]:g}",
                    *(f"{base * e[name]:.2g}" for name in ("theory", "theory_at_same_ess")),
                    *(f"{e[name]:.3f}" for name in ("ess", "log_ratio_rms")),
                    f"{e['log_rank_chi2']:.2f}",
                    f"{e['log_rank_p']:.2g}",
                ]
                for e in entries
            ],
        )
    )
    print(f"fixed difficulty, {CONTROL_UPDATES} updates")
    print(results.table(["kappa", *RATES], [[k, *c.values()] for k, c in counts.items()]))


if __name__ == "__main__":
    main()
