"""Bias and variance of the batch gradient at frozen weights, by the sampler's kernels and by its lag; the whole stack.

Usage: python -m tools.evidence.gradient_bias [--out DIR] [--groups N]. Kill it and start it again as you like: what is
in DIR is not done again.

The quick start's model, with half its layers and in bf16 on both sides, is warmed up and trained to version V as usual;
the policies of V, V - 2 and V - 8 are kept. Then nothing trains any more. Six samplers, vLLM servers with aligned or
stock kernels that hold one of the three, answer the same prompts with the same noise; a reference sampler, aligned and
at V, does so with other noise. One Megatron learner with aligned kernels, at V, takes the gradient of the project's
objective on every batch of 32 responses, 2,000 batches per sampler, in groups of 100. A group has each of 1,600 prompts
twice, so that all expectations are over noise and the division into batches, at these prompts.

Formulas: gradient_statistics.py. g_true is the expectation of the reference's gradient. The arm at lag 0 with aligned
kernels has the reference's distribution: that no bias is found there is the control, and the arms' distances from it,
whose noise they share, are the more exact estimates of their bias.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.evidence import results
from tools.evidence.gradient_stack import (
    BATCH,
    BATCHES,
    LAGS,
    LAYERS,
    MAX_LAG,
    PROMPTS,
    SAMPLES,
    VERSION,
    Arm,
    Gradients,
    Stack,
    read_gradients,
)
from tools.evidence.gradient_statistics import NORMAL_95, Estimate, Groups, jackknife

GROUPS, SEED, OTHER_SEED = 20, 11, 12
REFERENCE = Arm("aligned", 0, OTHER_SEED, "reference")
ARMS = (REFERENCE, *(Arm(kernels, lag, SEED, f"{kernels}-{lag}") for lag in LAGS for kernels in ("aligned", "stock")))
HEADER = ("arm", "group", "statistic", "value", "error")
Counts = dict[str, list[float]]
#: of the reference's distribution, with the noise of the others
EXACT = ARMS[1]


def twin(arm: Arm) -> Arm:
    """The aligned arm of the same lag and noise."""
    return next(a for a in ARMS if (a.kernels, a.lag, a.seed) == ("aligned", arm.lag, arm.seed))


def collect(stack: Stack, groups: int) -> tuple[Groups, NDArray[np.float64], list[Counts], int]:
    """Inner products, squared norms [arms, batches], what each arm's groups counted, and the number of parameters."""
    means, squares, counts = [], [], []
    for arm in ARMS:
        read = [read_gradients(stack.gradients(arm, piece)) for piece in range(groups)]
        means += [total / BATCHES for total, _, _ in read]
        squares.append([norms for _, norms, _ in read])
        counts.append({name: [count[name] for _, _, count in read] for name in read[0][2]})
    rows = np.stack(means)
    gram = (rows @ rows.T).reshape(len(ARMS), groups, len(ARMS), groups)
    norms = np.array(squares)
    return Groups(gram, norms.mean(-1)), norms.reshape(len(ARMS), -1), counts, rows.shape[1]


def sampled(counts: Counts) -> dict[str, float]:
    """Means over an arm's tokens and responses; the formulas of diagnostics.py."""
    total = {name: float(np.sum(values)) for name, values in counts.items()}
    tokens, responses = total["tokens"], total["responses"]
    return {
        "tokens": tokens,
        "k3": total["k3"] / tokens,
        "ess": total["w"] ** 2 / (tokens * total["w2"]),
        "ratio_max": max(counts["ratio_max"]),
        "differing": total["differing"] / tokens,
        "abs_diff_mean": total["difference"] / tokens,
        "abs_diff_max": max(counts["difference_max"]),
        "other": total["other"] / responses,
        "reward": total["reward"] / responses,
        "length": total["length"] / responses,
    }


def statistics(groups: Groups) -> dict[str, dict[str, Estimate]]:
    """Of every arm but the reference: bias, the same against EXACT, whose noise it shares, cosine and variances.

    Of a stock arm also the distance from its twin.
    """
    index = {arm: i for i, arm in enumerate(ARMS)}
    r = index[REFERENCE]
    found = {REFERENCE.name: {"variance": jackknife(groups, lambda g: g.relative_variance(r, r))}}
    for arm, i in index.items():
        if arm == REFERENCE:
            continue
        found[arm.name] = {
            "bias": jackknife(groups, lambda g, i=i: g.distance(i, r, r)),
            "cosine": jackknife(groups, lambda g, i=i: g.cosine(i, r)),
            "variance": jackknife(groups, lambda g, i=i: g.relative_variance(i, r)),
            "variance_ratio": jackknife(groups, lambda g, i=i: g.variance(i) / g.variance(r)),
        }
        if arm != EXACT:
            j = index[EXACT]
            found[arm.name]["paired_bias"] = jackknife(groups, lambda g, i=i, j=j: g.distance(i, j, r))
        if arm.kernels == "stock":
            j = index[twin(arm)]
            found[arm.name] |= {
                "paired": jackknife(groups, lambda g, i=i, j=j: g.distance(i, j, r)),
                "paired_variance_ratio": jackknife(groups, lambda g, i=i, j=j: g.variance(i) / g.variance(j)),
            }
    return found


def rows(
    groups: Groups, counts: list[Counts], own: dict[str, dict[str, float]], found: dict[str, dict[str, Estimate]]
) -> Iterator[tuple[object, ...]]:
    """Of every group: norm of the mean gradient, mean squared norm, ``sampled``; of all groups: that and ``found``."""
    for i, arm in enumerate(ARMS):
        for k in range(groups.gram.shape[1]):
            group = sampled({name: [values[k]] for name, values in counts[i].items()})
            group |= {"norm": float(np.sqrt(groups.gram[i, k, i, k])), "mean_square": float(groups.squares[i, k])}
            yield from ((arm.name, k, name, f"{value:.6g}", "") for name, value in group.items())
        yield from ((arm.name, "all", name, f"{value:.6g}", "") for name, value in own[arm.name].items())
        for name, each in found[arm.name].items():
            yield (arm.name, "all", name, f"{each.value:.6g}", f"{each.error:.3g}")


def draw(path: Path, found: dict[str, dict[str, Estimate]]) -> None:
    """Lengths of the differences, with one-sided 95% bounds where nothing was found, and variances."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    series = (
        ("aligned", "bias", -0.15, results.BLUE, "o", "aligned, against the reference"),
        ("stock", "bias", -0.05, results.ORANGE, "o", "stock, against the reference"),
        ("aligned", "paired_bias", 0.05, results.INK, "D", "aligned, against aligned at lag 0, paired"),
        ("stock", "paired", 0.15, results.GREEN, "^", "stock, against aligned at its lag, paired"),
    )
    places = np.arange(len(LAGS))
    for kernels, statistic, shift, color, marker, label in series:
        left.plot([], [], marker, color=color, label=label)
        for place, lag in zip(places + shift, LAGS, strict=True):
            if (each := found[f"{kernels}-{lag}"].get(statistic)) is None:
                continue
            low = np.sqrt(max(0.0, each.value - NORMAL_95 * each.error))
            left.plot([place, place], [low, each.at_most], color=color, linewidth=1.5)
            left.plot(place, each.root if each.found else each.at_most, marker if each.found else "_", color=color)
    left.set_yscale("symlog", linthresh=1e-3)
    left.set(ylabel="length of the difference / ||g_true||", ylim=(0, 100))
    left.axhline(0, color=results.GREY, linewidth=0.8)
    for kernels, color, shift in (("aligned", results.BLUE, -0.08), ("stock", results.ORANGE, 0.08)):
        each = [found[f"{kernels}-{lag}"]["variance_ratio"] for lag in LAGS]
        values, errors = [e.value for e in each], [2 * e.error for e in each]
        right.errorbar(places + shift, values, errors, fmt="o", color=color, capsize=3, label=kernels)
    right.axhline(1, color=results.GREY, linewidth=0.8)
    right.set(yscale="log", ylabel="variance of a batch gradient / reference's")
    for axes in (left, right):
        axes.set_xticks(places, [str(lag) for lag in LAGS])
        axes.set(xlabel="lag of the sampler, versions")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle("whole stack, frozen weights, bf16; bars: one-sided 95% bounds, and 2 standard errors", fontsize=10)
    figure.savefig(path, dpi=130)


def tables(found: dict[str, dict[str, Estimate]], own: dict[str, dict[str, float]]) -> str:
    def squared(each: Estimate) -> str:
        return f"{each.root:.3g}" if each.found else f"< {each.at_most:.2g}"

    first = [
        [
            name,
            squared(e["bias"]),
            f"{e['bias'].value:.2e} ± {e['bias'].error:.1e}",
            squared(e["paired_bias"]) if "paired_bias" in e else "",
            f"{e['cosine'].value:.4f} ± {e['cosine'].error:.4f}",
            f"{e['variance'].value:.1f} ± {e['variance'].error:.1f}",
            f"{e['variance_ratio'].value:.3f} ± {e['variance_ratio'].error:.3f}",
        ]
        for name, e in found.items()
        if name != REFERENCE.name
    ]
    second = [
        [
            lag,
            squared(e["paired"]),
            f"{e['paired'].value:.2e} ± {e['paired'].error:.1e}",
            f"{e['paired_variance_ratio'].value:.4f} ± {e['paired_variance_ratio'].error:.4f}",
        ]
        for lag in LAGS
        for e in [found[f"stock-{lag}"]]
    ]
    third = [
        [
            name,
            f"{s['tokens']:,.0f}",
            f"{s['k3']:.2e}",
            f"{s['ess']:.4f}",
            f"{s['ratio_max']:.3g}",
            f"{s['differing']:.4f}",
            f"{s['abs_diff_mean']:.2e}",
            f"{s['abs_diff_max']:.2e}",
            f"{s['other']:.4f}",
            f"{s['reward']:.4f}",
            f"{s['median_square']:.2f}",
            f"{s['largest_share']:.3f}",
        ]
        for name, s in own.items()
    ]
    return "\n\n".join(
        (
            results.table(
                ["arm", "bias", "squared", "bias, paired", "cosine", "variance", "variance / reference's"], first
            ),
            results.table(["lag", "stock - aligned", "squared", "variance stock / aligned"], second),
            results.table(
                ["arm", "tokens", "k3", "ESS", "largest weight", "tokens differing", "mean abs d", "max abs d",
                 "other responses", "reward", "median norm squared", "share of the largest"], third),
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results.ROOT / "runs" / "evidence" / "gradient_bias")
    parser.add_argument("--results", type=Path, default=results.ROOT / "docs" / "results", help="CSV, PNG and JSON")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"of {BATCHES} batches, per arm")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    stack = Stack(chosen.out)
    stack.make_snapshots()
    for arm in ARMS:
        stack.sample(arm, chosen.groups)
    learner = Gradients(stack)
    for piece in range(chosen.groups):
        for arm in ARMS:
            learner.piece(arm, twin(arm), piece)
    groups, norms, counts, parameters = collect(stack, chosen.groups)
    found, own = statistics(groups), {}
    for arm, count, squares in zip(ARMS, counts, norms, strict=True):
        own[arm.name] = sampled(count) | {
            "median_square": float(np.median(squares)),
            "largest_share": float(squares.max() / squares.sum()),
        }
    path = chosen.results / "gradient_bias"
    results.write_csv(path.with_suffix(".csv"), HEADER, rows(groups, counts, own, found))
    draw(path.with_suffix(".png"), found)
    r = groups.arm(0)
    results.write_json(
        path.with_suffix(".json"),
        {
            "kind": "whole stack",
            "dtype": "bf16",
            "layers": LAYERS,
            "parameters": parameters,
            "version": VERSION,
            "max_lag_of_the_run": MAX_LAG,
            "lags": LAGS,
            "prompts": PROMPTS,
            "samples_per_group": SAMPLES,
            "batch": BATCH,
            "batches_per_group": BATCHES,
            "groups": chosen.groups,
            "seed": SEED,
            "seed_of_reference": OTHER_SEED,
            "norm_of_true_gradient": float(np.sqrt(max(0.0, groups.cross(r, r)))),
            "seconds": {
                name: round(sum(sum(count[name]) for count in counts)) for name in ("sampling_s", "learning_s")
            },
            "statistics": {
                name: {k: {"value": e.value, "error": e.error} for k, e in entries.items()}
                for name, entries in found.items()
            },
            "sampled": own,
        },
    )
    print(tables(found, own))


if __name__ == "__main__":
    main()
