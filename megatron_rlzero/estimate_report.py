"""Prints an estimate as tables, and which settings to change where a rank does not fit into its device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rlzero.architectures import architecture
from megatron_rlzero.architectures.layouts import learner_layout
from megatron_rlzero.config import Config
from megatron_rlzero.estimate import Estimate, Rank, estimate, learner_ranks, parallel_sizes, stages
from megatron_rlzero.validation import validate

GIB = 2**30
#: of the device's memory; the rest is for the CUDA context, NCCL and what an operator holds while it runs
USABLE = 0.9


def report(
    config: Config, hf: dict[str, Any], memory_gib: float, bandwidth_gib_s: float, console: Console | None = None
) -> bool:
    """Prints everything; returns whether each learner rank and each server worker fits.

    Args:
        memory_gib: of one device.
        bandwidth_gib_s: that one rank sends or receives.
    """
    console = console or Console(soft_wrap=True, width=None if sys.stdout.isatty() else 110)
    found = estimate(config, hf)
    learner, rollout = config.learner, config.rollout
    console.print(
        f"{hf['model_type']}: {found.model_parameters:,} parameters; {learner.world_size} learner ranks: "
        f"tensor {learner.tensor_model_parallel_size}, pipeline {learner.pipeline_model_parallel_size}, expert "
        f"{learner.expert_model_parallel_size}; {_servers(config)} server(s) of {rollout.tensor_model_parallel_size}",
        highlight=False,
    )
    console.print(_memory_table(config, hf, found))
    console.print(_refit_table(found, bandwidth_gib_s))
    worst = max(found.ranks, key=lambda rank: rank.total)
    limit = USABLE * memory_gib * GIB
    fits = worst.total <= limit
    console.print(
        f"device of {memory_gib:g} GiB, {USABLE:.0%} of it usable: the largest learner rank, {_gib(worst.total)}, "
        f"{'fits' if fits else 'does not fit'}",
        highlight=False,
    )
    if not fits:
        options = [(setting, total) for setting, total in alternatives(config, hf) if total < worst.total]
        for setting, total in sorted(options, key=lambda option: option[1]):
            console.print(f"  {setting}: {_gib(total)}{', fits' if total <= limit else ''}", highlight=False)
        if not options:
            console.print("  no single setting helps; add ranks", highlight=False)
    left = limit - found.worker_bytes
    console.print(
        f"a server worker's weights take {_gib(found.worker_bytes)}"
        + (f" and leave {_gib(left)} for keys, values and activations" if left > 0 else ": they do not fit; raise ")
        + ("" if left > 0 else "rollout.tensor_model_parallel_size"),
        highlight=False,
    )
    return fits and left > 0


def alternatives(config: Config, hf: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """(one setting changed, bytes of the largest rank then), of changes that make a valid configuration."""
    learner = config.learner
    candidates: list[tuple[str, Any]] = [("optimizer.use_distributed_optimizer", True)]
    candidates += [("recompute", mode) for mode in ("selective", "full") if mode != learner.recompute]
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if learner.max_tokens_per_microbatch > longest:
        candidates.append(("max_tokens_per_microbatch", max(longest, learner.max_tokens_per_microbatch // 2)))
    for name in ("tensor", "pipeline", "expert"):
        key = f"{name}_model_parallel_size"
        candidates.append((key, 2 * getattr(learner, key)))
    candidates.append(("world_size", 2 * learner.world_size))
    for key, value in candidates:
        changed = deepcopy(config)
        *section, leaf = key.split(".")
        setattr(changed.learner.optimizer if section else changed.learner, leaf, value)
        if not validate(changed, starting=False, environ={}, weights=False):
            layout = learner_layout(architecture(hf), hf, parallel_sizes(changed), changed.reduction_slices)
            yield f"learner.{key}={value}", max(rank.total for rank in learner_ranks(changed, hf, layout))


def _servers(config: Config) -> int:
    return len(config.rollout.urls) or config.rollout.servers


def _memory_table(config: Config, hf: dict[str, Any], found: Estimate) -> Table:
    """The largest rank of every pipeline stage, and the stage's share of the forward pass's operations."""
    table = Table(title="a learner rank of each pipeline stage, GiB")
    columns = ("parameters", "gradients", "optimizer", "activations", "all")
    for name in ("stage", "Megatron layers", *columns, "work"):
        table.add_column(name, justify="right")
    layers, work = [len(part) for part in stages(config, hf)], sum(found.flops)
    for stage, count in enumerate(layers):
        rank: Rank = max((r for r in found.ranks if r.stage == stage), key=lambda r: r.total)
        values = [rank.parameters, rank.gradients, rank.optimizer, rank.activations, rank.total]
        table.add_row(f"{stage}", f"{count}", *(f"{v / GIB:.3f}" for v in values), f"{found.flops[stage] / work:.1%}")
    return table


def _refit_table(found: Estimate, bandwidth_gib_s: float) -> Table:
    refit = found.refit
    table = Table("", "least", "mean", "most", title="one refit of all servers")
    for name, by_rank in (("sent by a learner rank", refit.sent), ("received by a worker", refit.received)):
        values = by_rank.values()
        table.add_row(name, _gib(min(values)), _gib(sum(values) / len(values)), _gib(max(values)))
    table.add_section()
    table.add_row("messages", "", f"{refit.messages:,}", "")
    table.add_row("most sent / mean", "", f"{refit.imbalance:.3f}", "")
    seconds = refit.seconds(bandwidth_gib_s * GIB)
    table.add_row(f"seconds at {bandwidth_gib_s:g} GiB/s per rank", "", f"{seconds:.2f}", "")
    return table


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 100 else f"{nbytes / 2**20:.2f} MiB"
