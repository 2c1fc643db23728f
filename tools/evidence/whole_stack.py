"""A long asynchronous run on the whole stack, aligned, and the same with stock kernels: real server, learner, refits.

Usage: python -m tools.evidence.whole_stack [--out DIR] [--updates 20000 5000]. Kill it and start it again as
you like: it goes on from the runs' checkpoints. max_lag 8, bf16 on both sides, the same prompts, noise, learning rate
and difficulties in both arms; the aligned arm goes first to the stock arm's length. The aligned arm stops at the first
byte in which learner and engine differ at equal weights. log_ratio.py splits the log-ratio of every token into age and
kernels. Ratios as in long_lag.py: the last 500 updates to updates 500 to 1,000, means, medians
for entropy and norm, and both for the KL.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.evidence import results
from tools.evidence.long_lag import EARLY, LATE
from tools.evidence.stack import Arm, Stack, columns, in_range

SETTINGS = {
    "model": {"dtype": "bf16"},
    "reduction_slices": 1,
    "learner": {
        "world_size": 1,
        "max_tokens_per_microbatch": 2048,
        "optimizer": {"lr": 2e-6, "lr_warmup_updates": 10},
    },
    "rollout": {"servers": 1, "max_prompt_tokens": 26, "max_response_tokens": 26},
    "loop": {"max_lag": 8, "prompts_per_update": 32},
    "probe": {"every": 100},
}
STOCK = ("kernels=stock", "probe.on_mismatch=log")
#: what is shown of an update, and the updates of which a line of the CSV is the mean, or the largest of LARGEST
SHOWN = (
    "rollout_kl/k3", "kernel/k3", "age/k3", "kernel/rms", "age/rms", "kernel/differing", "kernel/tokens",
    "kernel/abs_max", "is/renyi3", "is/ess", "is/ratio_max", "lag/mean", "lag/max", "entropy", "grad_norm",
    "weights/change", "advantage/nonzero", "reward/mean", "response/length_mean", "seconds/update",
)  # fmt: skip
LARGEST, EVERY = ("kernel/abs_max", "is/ratio_max", "lag/max"), 50


def figures(x: dict[str, NDArray], held_out: list[dict[str, float]]) -> dict[str, float]:
    """What is told of an arm, from its metrics of every update."""

    def ratio(name: str, mean=np.mean) -> float:
        early = mean(x[name][EARLY])
        return float(mean(x[name][LATE]) / early) if early else float("nan")

    k3, renyi = x["rollout_kl/k3"], x["is/renyi3"]
    return {
        "updates": len(k3),
        "lag mean": float(x["lag/mean"].mean()),
        "lag max": float(x["lag/max"].max()),
        "tokens compared at equal weights": float(x["kernel/tokens"].sum()),
        "of them differing": float(x["kernel/differing"].sum()),
        "largest difference": float(x["kernel/abs_max"].max()),
        "kernel k3 median": float(np.median(x["kernel/k3"])),
        "age k3 median": float(np.median(x["age/k3"])),
        "k3 median": float(np.median(k3)),
        "k3 peak/median": float(k3.max() / np.median(k3)),
        "Renyi-3 peak/median": float(renyi.max() / np.median(renyi)),
        "smallest ESS": float(x["is/ess"].min()),
        "largest weight": float(x["is/ratio_max"].max()),
        "KL last/first": ratio("rollout_kl/k3"),
        "KL last/first, medians": ratio("rollout_kl/k3", np.median),
        "kernel KL last/first": ratio("kernel/k3"),
        "entropy last/first": ratio("entropy", np.median),
        "grad norm last/first": ratio("grad_norm", np.median),
        "weight change last/first": ratio("weights/change"),
        "nonzero advantages": float(x["advantage/nonzero"].mean()),
        "pass@1 in 0.4 to 0.7": in_range(x["reward/mean"]),
        "held-out first": held_out[0]["eval/sampled"],
        "held-out last": float(np.mean([line["eval/sampled"] for line in held_out[-5:]])),
        "seconds per update": float(np.median(x["seconds/update"])),
    }


def probe(stack: Stack, arm: Arm) -> dict[str, object]:
    """The command ``probe`` on the arm's last policy, with the arm's kernels: differing tokens and router choices."""
    version = stack.version(arm)
    kept = stack.out / f"probe-{arm.name}-{version}.json"
    if not kept.exists():
        command = [sys.executable, "-m", "megatron_rlzero", "probe", str(stack.config), *arm.overrides]
        command += [f"model.path={stack.out / arm.name / 'policy'}", f"run_dir={stack.out / 'probe'}"]
        output = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True).stdout
        router = re.search(r"router choices that differ (\d+) of (\d+)", output)
        tokens = re.search(r"all\D+(\d+)\D+(\d+)", output)
        if not (router and tokens):
            raise RuntimeError(f"the probe of {arm.name} printed:\n{output}")
        found = {"version": version, "tokens": int(tokens[1]), "differing": int(tokens[2])}
        kept.write_text(json.dumps(found | {"router": int(router[1]), "routed": int(router[2])}))
    return json.loads(kept.read_text())


def probed(stack: Stack) -> dict[str, dict[str, object]]:
    """All probes of the two arms, the aligned arm's first."""
    found = [(path.stem.split("-")[1], json.loads(path.read_text())) for path in stack.out.glob("probe-*.json")]
    return {f"{arm}, {p['version']}": p for arm, p in sorted(found, key=lambda x: (x[0], x[1]["version"]))}


def rows(arm: Arm, x: dict[str, NDArray]) -> list[tuple]:
    """One line per EVERY updates."""
    ends = range(EVERY, len(x["lag/max"]) + 1, EVERY)
    parts = [(end, {name: x[name][end - EVERY : end] for name in SHOWN}) for end in ends]
    return [
        (arm.name, end, *(float((np.max if name in LARGEST else np.mean)(part[name])) for name in SHOWN))
        for end, part in parts
    ]


def draw(path: Path, found: dict[str, dict[str, NDArray]], held_out: dict[str, list[dict[str, float]]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(6, 1, sharex=True)
    for (name, x), colour in zip(found.items(), (results.BLUE, results.ORANGE), strict=False):

        def line(axis, metric: str, label: str, style: str = "-", x=x, colour=colour) -> None:
            values = x[metric][: len(x[metric]) // EVERY * EVERY].reshape(-1, EVERY)
            values = (np.max if metric in LARGEST else np.mean)(values, 1)
            ends = EVERY * np.arange(1, len(values) + 1)
            axis.plot(ends, np.where(values > 0, values, np.nan), style, color=colour, label=label, linewidth=0.9)

        line(axes[0], "age/k3", f"{name}: age")
        line(axes[0], "kernel/k3", f"{name}: kernels", "--")
        for axis, metric in zip(axes[1:5], ("is/ratio_max", "is/ess", "entropy", "reward/mean"), strict=True):
            line(axis, metric, name)
        points = [(e["update"], e["eval/sampled"]) for e in held_out[name]]
        axes[5].plot(*zip(*points, strict=True), color=colour, label=name, linewidth=0.9)
    labels = ("k3 of each term", "largest weight", "ESS", "entropy", "pass@1 in training", "held-out pass@1")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_ylabel(label)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel(f"update; per {EVERY}, zeros left out of the first panel")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.ROOT / "runs" / "evidence" / "whole_stack")
    parser.add_argument("--results", type=Path, default=results.ROOT / "docs" / "results")
    parser.add_argument("--updates", type=int, nargs=2, default=(20_000, 5_000), metavar=("ALIGNED", "STOCK"))
    chosen = parser.parse_args()
    aligned, stock = Arm("aligned", chosen.updates[0]), Arm("stock", chosen.updates[1], STOCK)
    stack = Stack(chosen.out, SETTINGS)
    stack.go_on(aligned, min(aligned.updates, stock.updates), leads=True)
    if stack.version(aligned) == stock.updates:
        probe(stack, aligned)
    stack.go_on(stock, stock.updates, leads=False)
    stack.go_on(aligned, aligned.updates, leads=True)
    x = {arm.name: columns(stack.lines(arm)) for arm in (aligned, stock)}
    held_out = {arm.name: stack.held_out(arm) for arm in (aligned, stock)}
    short = {name: values[: stock.updates] for name, values in x["aligned"].items()}
    cut = [line for line in held_out["aligned"] if line["update"] <= stock.updates]
    summary = {
        "aligned": figures(x["aligned"], held_out["aligned"]),
        "aligned, at the stock arm's length": figures(short, cut),
        "stock": figures(x["stock"], held_out["stock"]),
    }
    for arm in (aligned, stock):
        probe(stack, arm)
    probes = probed(stack)
    path = chosen.results / "whole_stack"
    results.write_csv(
        path.with_suffix(".csv"), ("arm", "update", *SHOWN), rows(aligned, x["aligned"]) + rows(stock, x["stock"])
    )
    draw(path.with_suffix(".png"), x, held_out)
    found = {
        "settings": SETTINGS,
        "seed": 1,
        "difficulties": stack.difficulties(),
        "summary": summary,
        "probes": probes,
    }
    results.write_json(path.with_suffix(".json"), {"kind": "whole stack"} | found)
    print(
        results.table(
            ["", *summary], [[name, *(f"{s[name]:.3g}" for s in summary.values())] for name in summary["stock"]]
        )
    )
    print(results.table(["probe", *next(iter(probes.values()))], [[name, *p.values()] for name, p in probes.items()]))


if __name__ == "__main__":
    main()
