"""What a run says at its end: a short table, completions before and after, and where everything lies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_rlzero.config import Config
from megatron_rlzero.environments.prompts import load_tokenizer
from megatron_rlzero.metrics import COMPLETIONS_FILE, read_metrics

#: updates at each end of the run whose reward is averaged
WINDOW = 20
PHASES = ("generation", "learning", "waiting_for_rollouts", "waiting_for_learner", "refit")


def summarise(config: Config, console: Console) -> None:
    """Prints the table of a finished run, read from its run directory."""
    lines = read_metrics(config.run_dir)
    updates = [line for line in lines if "reward/mean" in line]
    held_out = [line for line in lines if "eval/sampled" in line]
    console.print(table(updates, held_out))
    console.print(completions(config))
    console.print(f"metrics    {config.run_dir}/metrics.jsonl\nplot       {config.run_dir}/plot.png")
    console.print(f"policy     {config.run_dir}/policy\nbest       {config.run_dir}/best", highlight=False)


def table(updates: list[dict[str, float]], held_out: list[dict[str, float]]) -> Table:
    """Accuracy, lag, mismatch and seconds of a run; ``updates`` and ``held_out`` are lines of metrics.jsonl."""
    first, last = held_out[0], held_out[-1]
    of = lambda name: np.array([line[name] for line in updates])  # noqa: E731
    window = min(WINDOW, len(updates))
    reward = of("reward/mean")
    mean_lag = np.average(of("lag/mean"), weights=np.maximum(of("response/action_tokens"), 1e-9))
    compared = sum(line["eval/mismatch/tokens"] for line in held_out)
    differing = sum(line["eval/mismatch/tokens"] * line["eval/mismatch/differing_frac"] for line in held_out)
    largest = max(line["eval/mismatch/abs_diff_max"] for line in held_out)
    result = Table("", "before", "after", title=f"{len(updates)} updates")
    result.add_row("held-out accuracy, sampled", f"{first['eval/sampled']:.3f}", f"{last['eval/sampled']:.3f}")
    result.add_row("held-out accuracy, greedy", f"{first['eval/greedy']:.3f}", f"{last['eval/greedy']:.3f}")
    result.add_row(f"mean reward, {window} updates", f"{reward[:window].mean():.3f}", f"{reward[-window:].mean():.3f}")
    result.add_section()
    lag = f"{mean_lag:.2f} / {of('lag/p99').max():.0f} / {of('lag/max').max():.0f}"
    result.add_row("lag of a token, mean / p99 / max", "", lag)
    result.add_row("mismatch at equal weights, tokens", "", f"{differing:.0f} of {compared:.0f}")
    result.add_row("mismatch at equal weights, largest", "", f"{largest:.2e}")
    result.add_section()
    result.add_row("tokens/s", "", f"{of('tokens').sum() / of('seconds/update').sum():,.0f}")
    for phase in PHASES:
        overlap = ", side by side" if phase == "generation" else ""
        result.add_row(f"seconds, {phase.replace('_', ' ')}{overlap}", "", f"{of(f'seconds/{phase}').sum():.1f}")
    result.add_row("seconds, all updates", "", f"{of('seconds/update').sum():.1f}")
    return result


def completions(config: Config) -> Table:
    """The first held-out prompts with their greedy responses before and after."""
    lines = [json.loads(line) for line in (Path(config.run_dir) / COMPLETIONS_FILE).read_text().splitlines()]
    tokenizer = load_tokenizer(config.model.path)
    result = Table("prompt", "before", "after", title="greedy completions")
    # a run may have gone on with another eval.prompts
    for before, after in zip(lines[0]["greedy"], lines[-1]["greedy"], strict=False):
        cells = [
            tokenizer.decode(c[part]) for c, part in ((before, "prompt"), (before, "response"), (after, "response"))
        ]
        result.add_row(*cells)
    return result
