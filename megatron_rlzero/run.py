"""One rank of a run: builds its part of the learner; rank 0 also starts the servers and leads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_rlzero import checkpoint, loop
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.config import Config
from megatron_rlzero.generation.engine import RolloutEngine
from megatron_rlzero.generation.refit import Refit
from megatron_rlzero.invariance import probe, trace
from megatron_rlzero.learner.build import initialise_distributed
from megatron_rlzero.learner.channel import Channel
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.learner.ranks import Ranks, follow
from megatron_rlzero.metrics import RunLog
from megatron_rlzero.rollout import Rollout
from megatron_rlzero.rollout_files import read_rollouts


def train(config: Config) -> None:
    """Trains as ``config`` says; called on every rank that ``launch`` or torchrun has started.

    Raises:
        RuntimeError: on rank 0, naming the server or process that died; the launcher ends the other ranks.
        FloatingPointError: on every rank: the update would not have been finite.
    """

    if _rank() > 0:
        _run(config, lambda ranks, engine: None)
        return
    saved = checkpoint.resume(config.run_dir) if config.checkpoint.resume else None
    with RunLog(config, saved=saved) as log:
        start = saved or Saved()
        # Where max_lag is smaller than it was, some are too old by now and are sampled again.
        lag = config.loop.max_lag
        finished = [r for r in start.finished if r.versions[r.action_mask].min() >= r.update - lag]
        _run(config, lambda ranks, engine: loop.train(config, ranks, engine, log, start), finished)


def replay(config: Config, files: Sequence[str], state: str | None) -> None:
    """Trains on recorded batches alone, without servers, and exports the policy; called on every rank.

    Args:
        files: one update each, in their order.
        state: directory of a checkpoint to begin with; None is ``model.path``.
    """
    learner, channel, _ = _join(config, None)
    if _rank() > 0:
        follow(learner, channel, None)
    else:
        ranks = Ranks(learner, channel, None)
        with RunLog(config) as log:
            if state is not None:
                ranks.load(str(checkpoint.read(Path(state)).learner))
            for rollouts in map(read_rollouts, files):
                update = rollouts[0].update
                metrics, log_probs = loop.learn(config, ranks, rollouts, update)
                log.update(update, metrics)
                try:
                    loop.check_same_version(config, rollouts, log_probs, update)
                except RuntimeError as error:
                    other = "model.path" if state is None else f"--checkpoint {state}"
                    raise RuntimeError(f"{error}. Or the first batch was not sampled by {other}") from error
            ranks.export(f"{config.run_dir}/policy")
        ranks.stop()
    dist.destroy_process_group()


def run_probe(config: Config) -> int:
    """Compares the engine's log-probs with the learner's, prints a table, and writes probe.json into run_dir.

    Returns:
        On rank 0, how many tokens and operators differ; 0 on the other ranks.
    """
    rows: list[probe.Row] = []
    documents: list[list[int]] = []

    def lead(ranks: Ranks, engine: RolloutEngine) -> None:
        loop.hand_over(ranks, engine, 0)
        tokens, longest = config.probe.tokens, config.rollout.max_response_tokens
        rows.extend(probe.grid(engine, ranks, config.eval.prompts, tokens, longest, version=0))
        documents.extend(r.tokens.tolist() for r in engine.evaluate(greedy=True)[: probe.TRACED])

    _run(config, lead)
    if _rank() > 0:
        return 0
    directory = Path(config.run_dir)
    layers = trace.compare_layers(config, documents, directory / "trace")
    result = probe.report(rows) | {"kernels": config.kernels, "dtype": config.model.dtype, "layers": asdict(layers)}
    (directory / "probe.json").write_text(json.dumps(result, indent=2) + "\n")
    console = Console(soft_wrap=True)
    console.print(_table(config, rows, result))
    console.print(
        f"operators compared one by one {layers.operators}, differing {len(layers.differing)}"
        + (f", the first: {layers.first}" if layers.first else "")
        + f"\nrouter choices that differ {layers.router_choices} of {layers.routed}",
        highlight=False,
    )
    return result["differing"] + len(layers.differing)


def _run(config: Config, lead: Callable[[Ranks, RolloutEngine], None], finished: Sequence[Rollout] = ()) -> None:
    """Brings up learner and, on rank 0, servers; runs ``lead`` there while the other ranks follow.

    ``finished``: responses of a checkpoint, which are not sampled again.
    """
    if _rank() > 0:
        follow(*_join(config, []))
    else:
        engine = RolloutEngine(config, finished)
        try:
            engine.wait_ready()
            ranks = Ranks(*_join(config, [(s.name, s.url, s.workers) for s in engine.servers]))
            lead(ranks, engine)
            ranks.stop()
        except (RuntimeError, OSError) as error:
            engine.blame(error)
            raise
        finally:
            engine.close()
    dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ["RANK"])


def _join(config: Config, servers: list[tuple[str, str, int]] | None) -> tuple[Learner, Channel, Refit | None]:
    """Collective: the learner, and the way from its ranks to the servers, which rank 0 knows; None where are none."""
    device, store = initialise_distributed(config)
    learner = Learner(config, device)
    if servers is None:
        return learner, Channel(store), None
    weights = learner.weights
    refit = Refit(
        servers,
        dist.get_rank(),
        dist.get_world_size(),
        weights.layout,
        weights.engine_layout if config.kernels == "aligned" else weights.whole_layout,
        weights.dtypes,
        store,
        config.refit.backend,
        config.refit.interface,
        config.refit.deadline_s,
    )
    return learner, Channel(store), refit


def _table(config: Config, rows: list[probe.Row], result: dict) -> Table:
    title = f"kernels = {config.kernels}, {config.model.dtype}: learner against engine at equal weights"
    table = Table("sampled", "scored", "tokens", "differing", "largest difference", title=title)
    for row in rows:
        table.add_row(row.sampled, row.scored, f"{row.tokens}", f"{row.differing}", f"{row.largest:.2e}")
    table.add_section()
    table.add_row("all", "", f"{result['tokens']}", f"{result['differing']}", f"{result['largest']:.2e}")
    return table
