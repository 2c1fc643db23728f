"""One learner rank that trains as the command ``train`` does and splits every token's log-ratio into its two terms.

Usage: python -m tools.evidence.log_ratio CONFIG [a.b=c ...], with learner.world_size 1. With u the update's version, v
the one that sampled the token, pi the learner and mu the engine: log pi_u - log mu_v is (log pi_u - log pi_v) + (log
pi_v - log mu_v), the age of the weights and the kernels. log pi_v comes from the weights of version v, of which the
last max_lag + 1 are kept in memory; after a start the versions before it are not there, and their tokens are not
counted. Added to metrics.jsonl: kernel/* and age/* over these tokens, weights/change (Euclidean norm of the step of the
fp32 parameters), advantage/nonzero (share of responses).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rlzero import loop
from megatron_rlzero.config import Config
from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.learner.ranks import Ranks
from megatron_rlzero.rollout import Rollout

#: version and weights, by local name
Kept = deque[tuple[int, dict[str, Tensor]]]


def snapshot(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.weights.local.items()}


@torch.no_grad()
def put(learner: Learner, weights: dict[str, Tensor]) -> None:
    for name, tensor in learner.weights.local.items():
        tensor.copy_(weights[name])


def scored(learner: Learner, kept: Kept, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """log pi_v of every action token, fp32, by the weights that sampled it; NaN where they are not kept."""
    found = [np.full(len(r.tokens), np.nan, np.float32) for r in rollouts]
    now = kept[-1][1]
    for version, weights in kept:
        chosen = [i for i, r in enumerate(rollouts) if (r.versions[r.action_mask] == version).any()]
        if not chosen:
            continue
        put(learner, weights)
        log_pi = learner.score(Batch.of([rollouts[i] for i in chosen]))[0].numpy()
        for i, values in zip(chosen, loop.split([rollouts[i] for i in chosen], log_pi), strict=True):
            own = rollouts[i].versions == version
            found[i][own] = values[own]
    put(learner, now)
    return found


def terms(
    rollouts: Sequence[Rollout], then: Sequence[np.ndarray], now: Sequence[np.ndarray], update: int
) -> dict[str, float]:
    """Both terms' size over the tokens whose log pi_v is known; ``now`` is log pi_u."""

    def over_actions(arrays) -> np.ndarray:
        return np.concatenate([a[r.action_mask] for r, a in zip(rollouts, arrays, strict=True)])

    pi_v, pi_u = over_actions(then), over_actions(now)
    mu, versions = over_actions([r.logprobs for r in rollouts]), over_actions([r.versions for r in rollouts])
    known = np.isfinite(pi_v)
    pi_v, pi_u, mu, versions = pi_v[known], pi_u[known], mu[known], versions[known]
    kernel, age = pi_v.astype(np.float64) - mu, pi_u.astype(np.float64) - pi_v
    differing = pi_v.view(np.int32) != mu.view(np.int32)
    return {
        "kernel/tokens": float(len(kernel)),
        "kernel/differing": float(differing.sum()),
        "kernel/abs_max": float(np.abs(kernel).max(initial=0.0)),
        "kernel/rms": rms(kernel),
        "kernel/k3": k3(kernel),
        "age/rms": rms(age),
        "age/k3": k3(age),
        "age/own_version_differing": float(((versions == update) & (age != 0)).sum()),
    }


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if len(values) else 0.0


def k3(log_ratio: np.ndarray) -> float:
    return float(np.mean(np.expm1(log_ratio) - log_ratio)) if len(log_ratio) else 0.0


def observe(config: Config) -> None:
    """Puts the split into the loop: before each step the tokens are scored with the weights that sampled them."""
    kept: Kept = deque(maxlen=config.loop.max_lag + 1)
    learn = loop.learn

    def observed(config: Config, ranks: Ranks, rollouts: list[Rollout], update: int):
        learner = ranks._learner
        kept.append((update, snapshot(learner)))
        then = scored(learner, kept, rollouts)
        before = [held.main.detach().clone() for held in learner.state.held.values()]
        metrics, log_probs = learn(config, ranks, rollouts, update)
        after = (held.main.detach() for held in learner.state.held.values())
        change = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(after, before, strict=True))
        return metrics | terms(rollouts, then, log_probs, update) | {
            "weights/change": change**0.5,
            "advantage/nonzero": float(np.mean(loop.advantages(config, rollouts) != 0)),
        }, log_probs

    loop.learn = observed


def main() -> int:
    from megatron_rlzero.launch import is_rank, launch, launcher
    from megatron_rlzero.run import train
    from megatron_rlzero.validation import load
    from megatron_rlzero.watch import killed_with

    if not is_rank():
        load(sys.argv[1], sys.argv[2:])
        return launch(["-m", "tools.evidence.log_ratio", *sys.argv[1:]], 1)
    killed_with(launcher())
    config = load(sys.argv[1], sys.argv[2:], starting=False)
    observe(config)
    train(config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
