"""The training loop: take the rollouts of an update, step, hand the new weights to the servers.

``max_lag: 0`` waits for its own rollouts every time, and that is synchronous training; ``max_lag: N`` lets the engine
start the prompts of the next N updates on the present weights. The code is the same: update u trains on exactly its own
prompts, none of whose tokens was sampled by weights older than version u - max_lag.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_rlzero import advantage, checkpoint
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.config import Config
from megatron_rlzero.diagnostics import mismatch_metrics, update_metrics
from megatron_rlzero.generation.engine import Admit, BadServer
from megatron_rlzero.generation.versions import recomputed_tokens
from megatron_rlzero.invariance.probe import Row, compare, fixed_batch
from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.ranks import Ranks
from megatron_rlzero.rollout import Rollout
from megatron_rlzero.rollout_files import write_rollouts

if TYPE_CHECKING:
    from megatron_rlzero.generation.refit import RefitStats
    from megatron_rlzero.generation.server import Server


class Engine(Protocol):
    """What the loop asks of generation/engine.py."""

    prompts: int

    def set_version(self, version: int) -> None: ...
    def detach(self, name: str, reason: str) -> None: ...
    def take(self, update: int, admit: Admit | None = None) -> list[Rollout]: ...
    def finished(self, update: int) -> list[Rollout]: ...
    def refitted(self) -> list[str]: ...
    def joining(self) -> list[Server]: ...
    def attach(self, server: Server) -> bool: ...
    def turn_away(self, server: Server, reason: str) -> None: ...
    def evaluate(self, greedy: bool, admit: Admit | None = None) -> list[Rollout]: ...
    def begin_evaluation(
        self, greedy: bool, prompts: int, samples: int, concurrency: int, server: str | None = None
    ) -> int: ...
    def finish_evaluation(self, request: int, admit: Admit | None = None) -> list[Rollout]: ...


class Log(Protocol):
    """What the loop tells metrics.py."""

    def update(self, update: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, version: int, metrics: dict[str, float], greedy: list[Rollout]) -> None: ...
    def note(self, text: str) -> None: ...
    def sizes(self) -> dict[str, int]: ...


def train(config: Config, ranks: Ranks, engine: Engine, log: Log, saved: Saved) -> None:
    """Runs the updates from ``saved`` on to ``config.loop.updates``, then exports the policy to run_dir/policy.

    Raises:
        FloatingPointError: from the learner, before anything was stepped.
        RuntimeError: from the engine: the client or the last server died, or too many responses failed.
    """
    if saved.learner is not None:
        ranks.load(str(saved.learner))
    join = partial(admit, config, ranks, engine, log)
    refit = hand_over(ranks, engine, saved.version)
    check(config, ranks, engine, partial(join, saved.version))
    best = saved.best
    if saved.version == 0:
        best = evaluate(config, ranks, engine, log, 0, best, partial(join, 0))
    busy_until = -1.0
    for update in range(saved.version, config.loop.updates):
        start = time.monotonic()
        rollouts = engine.take(update, partial(join, update))
        taken = time.monotonic()
        if config.loop.record_every and update % config.loop.record_every == 0:
            write_rollouts(recorded(config.run_dir, update), rollouts)
        metrics, log_probs = learn(config, ranks, rollouts, update)
        stepped = time.monotonic()
        version = update + 1
        pushed = version % config.refit.every == 0
        if pushed:
            refit = hand_over(ranks, engine, version)
        done = time.monotonic()
        began, generated = sampling_interval(rollouts)
        seconds = {
            "generation": generated - began,
            "waiting_for_rollouts": taken - start,
            "waiting_for_learner": max(began - busy_until, 0.0) if busy_until > 0 else 0.0,
            "learning": stepped - taken,
            "refit": refit.seconds if pushed else 0.0,
            "update": done - start,
        }
        metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
        metrics |= {
            "refit/bytes": refit.bytes if pushed else 0,
            "tokens_per_second": metrics["tokens"] / (done - start),
        }
        log.update(update, metrics)
        check_same_version(config, rollouts, log_probs, update)
        busy_until = max(busy_until, generated)
        if pushed and config.probe.every and version % config.probe.every == 0:
            check(config, ranks, engine, partial(join, version))
        last = version == config.loop.updates
        if last or (config.eval.every and version % config.eval.every == 0):
            if not pushed:
                hand_over(ranks, engine, version)
            best = evaluate(config, ranks, engine, log, version, best, partial(join, version))
        if config.checkpoint.every and (last or version % config.checkpoint.every == 0):
            began = time.monotonic()
            state = Saved(version, best, log.sizes(), engine.prompts, finished=engine.finished(version))
            path = checkpoint.save(config.run_dir, state, ranks.save, config.checkpoint.keep)
            log.note(f"checkpoint {path}: {time.monotonic() - began:.1f} s")
    ranks.export(f"{config.run_dir}/policy")


def learn(
    config: Config, ranks: Ranks, rollouts: list[Rollout], update: int
) -> tuple[dict[str, float], list[np.ndarray]]:
    """One update of the weights; its metrics but for the times, and the learner's log-prob of every token."""
    step = ranks.step(Batch.of(rollouts, advantages(config, rollouts)))
    gradients = step.gradients
    log_probs, entropies = (split(rollouts, x.numpy()) for x in (gradients.log_pi, gradients.entropy))
    return update_metrics(rollouts, log_probs, entropies, update) | {
        "loss": gradients.loss,
        "grad_norm": step.grad_norm,
        "grad_clipped": float(step.clipped),
        "stepped": float(step.stepped),
        "learning_rate": step.learning_rate,
        "microbatches": gradients.microbatches,
        "tokens": sum(len(r.tokens) for r in rollouts),
        "refit/recomputed_tokens": recomputed_tokens(rollouts),
    }, log_probs


def same_version(
    rollouts: Sequence[Rollout], log_probs: Sequence[np.ndarray], version: int
) -> tuple[list[Rollout], list[np.ndarray]]:
    """The rollouts with only those action tokens that ``version`` itself sampled."""
    same = [replace(r, action_mask=r.action_mask & (r.versions == version)) for r in rollouts]
    return same, list(log_probs)


def check_same_version(
    config: Config, rollouts: Sequence[Rollout], log_probs: Sequence[np.ndarray], version: int
) -> None:
    """Raises as ``check`` does, over the tokens of the batch that ``version`` itself sampled."""
    refuse(config, compare("in the loop", "packed", *same_version(rollouts, log_probs, version)))


def hand_over(ranks: Ranks, engine: Engine, version: int) -> RefitStats:
    """Brings every server to ``version``; one that was not there in time gets no further requests."""
    refit = ranks.push(version, engine.refitted())
    for name, reason in refit.detached.items():
        engine.detach(name, reason)
    engine.set_version(version)
    return refit


def admit(config: Config, ranks: Ranks, engine: Engine, log: Log, version: int) -> None:
    """Brings servers that wait to join to the present weights and probes them; one that fails gets no requests."""
    for server in engine.joining():
        faults = ranks.attach([(server.name, server.url, server.workers)])
        if not faults:
            faults = ranks.push_first(version, server.name).detached
        if not faults and config.probe.every:
            faults = {server.name: fault} if (fault := unfit(config, ranks, engine, server.name)) else {}
        name = f"{server.name} ({server.url})"
        if faults:
            engine.turn_away(server, faults[server.name])
            log.note(f"{name} is turned away: {faults[server.name]}")
        elif engine.attach(server):
            log.note(f"{name} joins")


def unfit(config: Config, ranks: Ranks, engine: Engine, server: str) -> str:
    """Why this server, which holds the present weights, is not to join; empty where it may."""
    try:
        row = fixed_batch(engine, ranks, config.eval.prompts, longest(config), server)
    except BadServer as error:
        return str(error)
    return mismatch(row) if row.differing and config.probe.on_mismatch == "stop" else ""


def check(config: Config, ranks: Ranks, engine: Engine, join: Admit) -> None:
    """The probe of one fixed batch, at equal weights.

    Raises:
        RuntimeError: a byte differs and ``probe.on_mismatch`` is stop.
    """
    if config.probe.every:
        refuse(config, fixed_batch(engine, ranks, config.eval.prompts, longest(config), admit=join))


def refuse(config: Config, row: Row) -> None:
    """Raises RuntimeError if tokens differ and ``probe.on_mismatch`` is stop."""
    if row.differing and config.probe.on_mismatch == "stop":
        raise RuntimeError(
            f"{mismatch(row)}. `megatron-rlzero probe` says where; to train on all the same, set probe.on_mismatch=log"
        )


def mismatch(row: Row) -> str:
    """What a comparison found, in words."""
    return (
        f"{row.differing} of {row.tokens} tokens differ between learner and engine at equal weights, by up to "
        f"{row.largest:.3g}; first: {row.first}"
    )


def longest(config: Config) -> int:
    """Tokens of the longest prompt and response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def recorded(run_dir: str, update: int) -> Path:
    """The file of a batch that is kept."""
    directory = Path(run_dir, "rollouts")
    directory.mkdir(exist_ok=True)
    return directory / f"update-{update:08d}.safetensors"


def sampling_interval(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """When the first of the responses was asked for and the last one was there, on time.monotonic's clock."""
    return min(r.info["start"] for r in rollouts), max(r.info["end"] for r in rollouts)


def evaluate(config: Config, ranks: Ranks, engine: Engine, log: Log, version: int, best: float, join: Admit) -> float:
    """Held-out pass@1, sampled and greedy, and the mismatch of log-probs at equal weights; keeps the best policy.

    The servers hold ``version`` throughout, so every token of the sampled responses is one that learner and server
    score with the same weights. Returns the best sampled accuracy so far.
    """
    sampled, greedy = engine.evaluate(False, join), engine.evaluate(True, join)
    log_probs = ranks.score_rollouts(sampled)
    accuracy = float(np.mean([r.reward for r in sampled]))
    metrics = {"eval/sampled": accuracy, "eval/greedy": float(np.mean([r.reward for r in greedy]))}
    log.evaluation(version, metrics | mismatch_metrics(sampled, log_probs, version), greedy)
    if accuracy > best:
        ranks.export(f"{config.run_dir}/best")
    return max(accuracy, best)


def advantages(config: Config, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The configured estimate over the responses that did not fail; failed ones, without action tokens, get 0.

    So does, for the estimates that compare responses to one prompt, the only one that is left of its group.
    """
    ok = np.array([r.finish_reason != "failed" for r in rollouts])
    rewards = np.array([r.reward for r in rollouts], dtype=np.float32)
    groups = np.array([r.item for r in rollouts])
    result = np.zeros(len(rollouts), dtype=np.float32)
    if config.loop.advantage in advantage.GROUPED:
        ok &= np.array([np.count_nonzero(groups[ok] == group) > 1 for group in groups])
    if ok.any():
        result[ok] = advantage.compute(config.loop.advantage, rewards[ok], groups[ok])
    return result


def split(rollouts: Sequence[Rollout], values: np.ndarray) -> list[np.ndarray]:
    """Cuts an array over all tokens of the batch into one per rollout."""
    return np.split(values, np.cumsum([len(r.tokens) for r in rollouts])[:-1])
