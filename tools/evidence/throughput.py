"""How much faster asynchronous training is, on the whole stack, than two synchronous arms, and how much it could be.

Usage: python -m tools.evidence.throughput [--out DIR] on a machine that does nothing else. Kill it and start it again
as you like: every run is a file in DIR, and one that is there is not run again.

Arms, each a run of the product with a real server and a real learner (throughput_run.py):

- asynchronous: loop.max_lag=8; the learner on one core, server, client and graders on the other;
- synchronous: the same but for loop.max_lag=0;
- colocated: loop.max_lag=0; learner and server have two threads each and both cores, one after the other.

Response lengths are drawn (drawn_client.py): exponential, with a heavy tail, or even. Sizes are chosen by synchronous
pilots, so that learning takes RATIO times as long as generation; where none does the command ends with exit code 3. The
speed-up is the quotient of the mean times of the same updates, with the same lengths; runs alternate, and it is the
median over REPEATS of them. throughput_bound.py derives what it is compared with.

The reward is compared on a task that can be learnt, the quick start's, with lengths as the policy chooses them: TASK
updates at lag 8 and at lag 0 for each seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_rlzero.metrics import read_metrics
from megatron_rlzero.validation import load
from tools.evidence import results, throughput_arms, throughput_run
from tools.evidence.throughput_arms import ARMS, LAG, MEASURED, PILOT, Sizes
from tools.evidence.throughput_bound import Fit, bound
from tools.tiny_run import CONFIG

#: tried in their order; the first whose pilot is within RATIO is used. More sequences at a time make the server faster,
#: recomputing activations makes the learner slower.
KINDS = {
    "exponential": tuple(
        Sizes(64, slots, 32, 128, recompute)
        for slots, recompute in ((48, "none"), (32, "none"), (48, "full"), (64, "full"), (24, "none"))
    ),
    "even": tuple(
        Sizes(64, slots, 64, 64, recompute)
        for slots, recompute in ((32, "none"), (48, "none"), (24, "none"), (32, "full"), (16, "none"))
    ),
}
REPEATS = 3
#: learning / generation of the pilot
RATIO, TOLERANCE = 1.0, 0.2
#: measured / bound that is to be reached
REACHED = 0.8
#: numbers of responses as parts of S, beside one, and how often each is measured
FITTED, FIT_REPEATS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1), 3
TASK_SEEDS, TASK, TASK_WINDOW = (1, 2, 3), 60, 20
OUTSIDE = 3
PUBLISHED = 2.40


def pilot(out: Path, kind: str, env: dict) -> tuple[Sizes | None, dict[str, float]]:
    """The first sizes within RATIO, None if there are none; learning / generation of all that were tried."""
    tried = {}
    for sizes in KINDS[kind]:
        name, updates = f"pilot-{kind}-{sizes.slots}-{sizes.recompute}", throughput_arms.PILOT_UPDATES
        run = throughput_arms.timing(out, name, kind, sizes, 0, True, updates, env)
        ratio = throughput_arms.mean(run, "learning", PILOT) / throughput_arms.mean(run, "generation", PILOT)
        tried[f"max_num_seqs {sizes.slots}, recompute {sizes.recompute}"] = ratio
        print(f"{name}: learning / generation = {ratio:.2f}", flush=True)
        if abs(ratio - RATIO) <= TOLERANCE:
            return sizes, tried
    return None, tried


def points(out: Path, kind: str, sizes: Sizes) -> list[dict]:
    """Measured answers of a server on its core for ``Fit``; measured at most once."""
    file = out / f"steps-{kind}.json"
    changed = throughput_arms.overrides(sizes, out / "model", 0, True, 1)
    at_once = sorted({1, *(max(1, round(part * sizes.slots)) for part in FITTED)})
    settings = {"overrides": changed, "mean": sizes.mean, "at_once": at_once, "repeats": FIT_REPEATS}
    if (found := throughput_arms.kept(file, settings)) is not None:
        return found["points"]
    print(f"step times, {kind} ...", flush=True)
    learner, server = throughput_arms.cores()
    with throughput_run.on(learner):
        config = load(CONFIG, [*changed, f"run_dir={out / 'runs' / file.stem}"], starting=False)
        with throughput_run.drawn("even", sizes.mean, server):
            found = throughput_run.step_times(config, at_once, FIT_REPEATS)
    return throughput_arms.saved(file, {"settings": settings, "points": found})["points"]


def task(out: Path, seed: int, lag: int, env: dict) -> dict:
    """A run of the quick start; "rows" has one entry, its result."""
    settings = {"overrides": [f"seed={seed}", f"loop.max_lag={lag}", f"loop.updates={TASK}", "eval.every=0"]}

    def rows(run_dir: Path) -> list[dict]:
        lines = read_metrics(run_dir)
        held_out = [line for line in lines if "eval/sampled" in line]
        updates = [line for line in lines if "reward/mean" in line]
        return [
            {name: held_out[-1][f"eval/{name}"] for name in ("sampled", "greedy")}
            | {"first_sampled": held_out[0]["eval/sampled"]}
            | {"reward": float(np.mean([line["reward/mean"] for line in updates[-TASK_WINDOW:]]))}
            | {"lag_mean": float(np.mean([line["lag/mean"] for line in updates]))}
            | {"differing": sum(line["eval/mismatch/differing_frac"] for line in held_out)}
        ]

    head = ["megatron_rlzero", "train", str(CONFIG)]
    return throughput_arms.stored(out, f"task-lag{lag}-seed{seed}", settings, head, env, None, rows)["rows"][0]


def compare(kind: str, sizes: Sizes, found: dict[str, list[dict]], fit: Fit) -> dict:
    """Everything that is told of one kind of lengths; parts are medians over the runs of an arm."""
    mean = throughput_arms.mean
    update = {arm: [mean(run, "period") for run in runs] for arm, runs in found.items()}
    parts = {
        arm: {name: float(np.median([mean(run, name) for run in runs])) for name in found[arm][0]["rows"][0]}
        for arm, runs in found.items()
    }
    # The learner's rank: all but the wait for the batch.
    sync = parts["synchronous"]
    rest = sync["period"] - sync["waiting_for_rollouts"] - sync["learning"]
    drawn = [throughput_arms.lengths(sizes, kind, update) for update in MEASURED]
    best = bound(drawn, sizes.slots, LAG, fit, sync["learning"], rest)
    fast = update["asynchronous"]
    ratios = {
        f"over {arm}": spread([slow / quick for slow, quick in zip(update[arm], fast, strict=True)])
        for arm in ("synchronous", "colocated")
    }
    return {
        "update": {arm: spread(values) for arm, values in update.items()},
        "parts": parts,
        "fit": vars(fit),
        "bound": best,
        "bound over colocated": float(np.median(update["colocated"])) / best["asynchronous"],
        "drain measured / fit": sync["generation"] / best["G_sync"],
        "speed-up": ratios,
        "measured / bound": ratios["over synchronous"][0] / best["speed_up"],
    }


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [float(f(values)) for f in (np.median, min, max)]


def rows(found: dict[str, dict[str, list[dict]]]) -> Iterator[tuple]:
    for kind, arms in found.items():
        for arm, runs in arms.items():
            for repeat, run in enumerate(runs):
                for row in run["rows"]:
                    yield kind, arm, repeat, int(row["update"] in MEASURED), *row.values()


def draw(path: Path, told: dict[str, dict], found: dict[str, dict[str, list[dict]]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    bars, times = figure.subplots(1, 2)
    for i, (kind, entry) in enumerate(told.items()):
        pairs = (("over synchronous", entry["bound"]["speed_up"]), ("over colocated", entry["bound over colocated"]))
        for j, (over, best) in enumerate(pairs):
            middle, low, high = entry["speed-up"][over]
            label = [None, None] if i or j else ["measured", "bound"]
            error = [[middle - low], [high - middle]]
            bars.bar(2 * i + j - 0.18, middle, 0.34, yerr=error, color=results.BLUE, label=label[0], capsize=3)
            bars.bar(2 * i + j + 0.18, best, 0.34, color=results.GREY, label=label[1])
        for j, (arm, runs) in enumerate(found[kind].items()):
            values = [row["period"] for run in runs for row in run["rows"] if row["update"] in MEASURED]
            colour = (results.BLUE, results.ORANGE, results.GREEN)[j]
            place = 4 * i + j + np.linspace(-0.3, 0.3, len(values))
            times.plot(place, values, ".", color=colour, markersize=3, label=None if i else arm)
            times.hlines(np.mean(values), 4 * i + j - 0.35, 4 * i + j + 0.35, color=results.INK)
    bars.axhline(1, color=results.INK, linewidth=0.6)
    bars.set_xticks(
        range(2 * len(told)), [f"{kind},\n{over}" for kind in told for over in entry["speed-up"]], fontsize=8
    )
    bars.set(ylabel="speed-up of asynchronous training")
    times.set_xticks([4 * i + 1 for i in range(len(told))], list(told))
    times.set(ylabel="seconds of an update", ylim=(0, None))
    for one in (bars, times):
        one.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def tables(told: dict[str, dict], ratios: dict[str, dict[str, float]], tasks: dict[str, list[dict]]) -> str:
    three = "{:.2f} ({:.2f} to {:.2f})".format
    lines = {
        "learning / generation, pilot": [f"{list(ratios[kind].values())[-1]:.2f}" for kind in told],
        **{f"seconds of an update, {arm}": [three(*e["update"][arm]) for e in told.values()] for arm in ARMS},
        "learner, L and R": [f"{e['bound']['L']:.2f}, {e['bound']['R']:.2f}" for e in told.values()],
        "t(b) in ms": [f"{1e3 * e['fit']['a']:.2f} + {1e3 * e['fit']['c']:.3f} b" for e in told.values()],
        "largest error of the fit": [f"{e['fit']['worst']:.0%}" for e in told.values()],
        "G_sync, G_async by the fit": [
            f"{e['bound']['G_sync']:.2f}, {e['bound']['G_async']:.2f}" for e in told.values()
        ],
        "measured drain / G_sync": [f"{e['drain measured / fit']:.2f}" for e in told.values()],
        "tokens computed again / sampled, asynchronous": [
            f"{e['parts']['asynchronous']['recomputed'] / e['bound']['tokens']:.2f}" for e in told.values()
        ],
        "mean lag, asynchronous": [f"{e['parts']['asynchronous']['lag_mean']:.1f}" for e in told.values()],
        "speed-up over synchronous": [three(*e["speed-up"]["over synchronous"]) for e in told.values()],
        "its bound": [f"{e['bound']['speed_up']:.2f}" for e in told.values()],
        "measured / bound": [f"{e['measured / bound']:.2f}" for e in told.values()],
        "speed-up over colocated": [three(*e["speed-up"]["over colocated"]) for e in told.values()],
        "its bound ": [f"{e['bound over colocated']:.2f}" for e in told.values()],
        "published, other models and machines": [f"{PUBLISHED:.2f}"] * len(told),
    }
    columns = {"held-out, sampled": "sampled", "held-out, greedy": "greedy", f"reward, last {TASK_WINDOW}": "reward"}
    cell = lambda runs, name: f"{np.mean([r[name] for r in runs]):.3f}: " + " ".join(f"{r[name]:.3f}" for r in runs)  # noqa: E731
    return (
        results.table(["", *told], [[name, *cells] for name, cells in lines.items()])
        + "\n\n"
        + results.table(
            ["", *columns, "mean lag"],
            [[arm, *(cell(runs, n) for n in columns.values()), cell(runs, "lag_mean")] for arm, runs in tasks.items()],
        )
    )


def main() -> int:
    env = dict(os.environ)  # of the runs: what options sets is for one process
    chosen = results.options("throughput", __doc__)
    out = chosen.out.resolve()
    throughput_run.make_model(out / "model")
    picked, ratios = {}, {}
    for kind in KINDS:
        picked[kind], ratios[kind] = pilot(out, kind, env)
        if picked[kind] is None:
            print(f"{kind}: learning / generation is {ratios[kind]}, never {RATIO} +- {TOLERANCE}; change KINDS")
            return OUTSIDE
    fits = {kind: Fit.of(points(out, kind, sizes)) for kind, sizes in picked.items()}
    found = {kind: {arm: [] for arm in ARMS} for kind in KINDS}
    for repeat in range(REPEATS):
        for kind, sizes in picked.items():
            for arm, (lag, pinned) in ARMS.items():
                updates = throughput_arms.UPDATES if lag else MEASURED.stop
                name = f"{kind}-{arm}-{repeat}"
                found[kind][arm].append(throughput_arms.timing(out, name, kind, sizes, lag, pinned, updates, env))
    subprocess.run([sys.executable, str(CONFIG.parent / "prepare.py"), str(CONFIG)], cwd=results.ROOT, check=True)
    tasks = {f"max_lag {lag}": [task(out, seed, lag, env) for seed in TASK_SEEDS] for lag in (0, LAG)}
    told = {kind: compare(kind, picked[kind], arms, fits[kind]) for kind, arms in found.items()}
    path = chosen.results / "throughput"
    header = ("lengths", "arm", "repeat", "measured", *found["even"]["synchronous"][0]["rows"][0])
    results.write_csv(path.with_suffix(".csv"), header, rows(found))
    draw(path.with_suffix(".png"), told, found)
    loads = [run["load_before"] for arms in found.values() for runs in arms.values() for run in runs]
    results.write_json(
        path.with_suffix(".json"),
        {
            "kind": "whole stack",
            "sizes": {kind: vars(sizes) for kind, sizes in picked.items()},
            "settings": {kind: arms["asynchronous"][0]["settings"] for kind, arms in found.items()},
            "measured_updates": [MEASURED.start, MEASURED.stop - 1],
            "repeats": REPEATS,
            "largest_load_before_a_run": max(loads),
            "pilot": ratios,
            "lengths": told,
            "published": PUBLISHED,
            "task": {"seeds": TASK_SEEDS, "updates": TASK, "runs": tasks},
        },
    )
    print(tables(told, ratios, tasks))
    low = {kind: e["measured / bound"] for kind, e in told.items() if e["measured / bound"] < REACHED}
    print(f"below {REACHED} of the bound: {low}" if low else f"both kinds of lengths reach {REACHED} of the bound")
    return 0


if __name__ == "__main__":
    sys.exit(main())
