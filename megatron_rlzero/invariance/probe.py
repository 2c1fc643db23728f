"""The gate: on the same weights, the bytes of the engine's log-probs against those of the learner.

Tokens are sampled by the engine in several ways (one request at a time, several, all at once, with the weights handed
over again in flight) and scored by the learner packed and alone. Trainer-inference invariance means that no token's
fp32 log-prob differs in a byte, in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from megatron_rlzero.rollout import Rollout

#: the fixed batch of the loop's probe holds at most this many tokens
LOOP_TOKENS = 2048
#: responses that are sampled one request at a time, and scored alone
ALONE = 32
#: responses that are compared operator by operator
TRACED = 64


class Engine(Protocol):
    """What the probe asks of generation/engine.py."""

    def refitted(self) -> list[str]: ...
    def begin_evaluation(
        self, greedy: bool, prompts: int, samples: int, concurrency: int, server: str | None = None
    ) -> int: ...
    def finish_evaluation(self, request: int, admit: Callable[[], None] | None = None) -> list[Rollout]: ...


class Scorer(Protocol):
    """The learner: log-prob of every token, fp32, one array per response; and handing over its weights."""

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]: ...
    def push(self, version: int, servers: Sequence[str]) -> Any: ...


@dataclass(frozen=True)
class Row:
    """One way of sampling and scoring.

    Attributes:
        tokens: action tokens compared.
        differing: how many have a log-prob that differs in a byte.
        largest: largest absolute difference, in nats.
        first: the first differing token, in words; empty where there is none.
    """

    sampled: str
    scored: str
    tokens: int
    differing: int
    largest: float
    first: str


def compare(sampled: str, scored: str, rollouts: Sequence[Rollout], log_pi: Sequence[np.ndarray]) -> Row:
    """Counts action tokens whose fp32 log-prob bytes differ between engine and learner."""
    tokens = differing = 0
    largest, first = 0.0, ""
    for rollout, pi in zip(rollouts, log_pi, strict=True):
        ours, theirs = pi[rollout.action_mask], rollout.logprobs[rollout.action_mask]
        unequal = ours.view(np.int32) != theirs.view(np.int32)
        tokens += len(ours)
        differing += int(unequal.sum())
        if unequal.any():
            largest = max(largest, float(np.abs(ours.astype(np.float64) - theirs)[unequal].max()))
            if not first:
                at = int(unequal.argmax())
                first = f"{rollout.name}, action token {at}: learner {ours[at]:.9g}, engine {theirs[at]:.9g}"
    return Row(sampled, scored, tokens, differing, largest, first)


def grid(engine: Engine, learner: Scorer, prompts: int, tokens: int, response_tokens: int, version: int) -> list[Row]:
    """Every way of sampling and scoring.

    Args:
        prompts: held-out prompts that there are.
        tokens: at least this many action tokens are compared in all, if responses are as long as they may be or at
            least half that.
        response_tokens: longest response.
        version: what the engine holds; it holds version + 1, with the same weights, afterwards.
    """
    few = min(ALONE, prompts)
    samples = max(1, -(-tokens // (prompts * response_tokens)))
    rows = []

    def sample(how: str, prompts: int, samples: int, concurrency: int, in_flight: bool = False) -> list[Rollout]:
        request = engine.begin_evaluation(False, prompts, samples, concurrency)
        if in_flight:
            learner.push(version + 1, engine.refitted())
        rollouts = engine.finish_evaluation(request)
        rows.append(compare(how, "packed", rollouts, learner.score_rollouts(rollouts)))
        return rollouts

    rollouts = sample("one at a time", few, 1, 1)
    alone = [learner.score_rollouts([rollout])[0] for rollout in rollouts]
    rows.append(compare("one at a time", "alone", rollouts, alone))
    sample("8 at a time", prompts, 1, 8)
    sample("all at once", prompts, samples, 0)
    sample("weights handed over in flight", prompts, samples, 0, in_flight=True)
    return rows


def fixed_batch(
    engine: Engine,
    learner: Scorer,
    prompts: int,
    longest: int,
    server: str | None = None,
    admit: Callable[[], None] | None = None,
) -> Row:
    """The loop's probe: one batch of at most LOOP_TOKENS tokens, the same prompts and noise every time.

    Args:
        longest: tokens of the longest prompt and response.
        server: the one to ask; None is all of them.
        admit: see RolloutEngine.
    """
    prompts = max(1, min(prompts, LOOP_TOKENS // longest))
    rollouts = engine.finish_evaluation(engine.begin_evaluation(False, prompts, 1, 0, server), admit)
    return compare("all at once", "packed", rollouts, learner.score_rollouts(rollouts))


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows and their totals as JSON values."""
    return {
        "tokens": sum(row.tokens for row in rows),
        "differing": sum(row.differing for row in rows),
        "largest": max((row.largest for row in rows), default=0.0),
        "rows": [asdict(row) for row in rows],
    }
