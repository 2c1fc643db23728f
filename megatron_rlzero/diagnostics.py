"""Metrics of one update from its responses: mismatch, rollout KL, importance weights, lag, reward, entropy.

Notation: over the action tokens of the update, d = log pi - log mu with log pi the learner's log-prob and log mu the
one recorded when the token was sampled; w = exp(d) = pi / mu. Both come as float32; sums run in float64. All means
are over action tokens unless said otherwise, and are 0 where there is none, as are maxima, so that every metric is
finite. Log-probs are natural logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_rlzero.rollout import Rollout


def _mean(values: NDArray | Sequence[float]) -> float:
    """Mean in float64; 0 of nothing."""
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0


def _max(values: NDArray) -> float:
    """Largest value; 0 of nothing."""
    return float(values.max()) if len(values) else 0.0


def mismatch(
    logprobs: NDArray[np.float32], behaviour: NDArray[np.float32], versions: NDArray[np.int32], version: int
) -> dict[str, float]:
    """The kernel mismatch: log pi against log mu where the weights are the same, at the learner's own version.

    mismatch/tokens         number of tokens with versions == version, those that are compared
    mismatch/differing_frac fraction of them whose float32 bytes differ; exactly 0 means trainer-inference invariance
    mismatch/abs_diff_max   max |d|
    mismatch/abs_diff_mean  mean |d|

    Args:
        logprobs: float32 [tokens], log pi.
        behaviour: float32 [tokens], log mu.
        versions: int32 [tokens], weight version that sampled the token.
        version: weight version that the update consumes.

    Raises:
        TypeError: a log-prob array that is not float32; bytes of another type say nothing.
    """
    for name, array in (("logprobs", logprobs), ("behaviour", behaviour)):
        if array.dtype != np.float32:
            raise TypeError(f"{name} is {array.dtype}; the byte comparison needs float32")
    same = versions == version
    pi, mu = np.ascontiguousarray(logprobs[same]), np.ascontiguousarray(behaviour[same])
    difference = np.abs(pi.astype(np.float64) - mu.astype(np.float64))
    return {
        "mismatch/tokens": float(same.sum()),
        "mismatch/differing_frac": _mean(pi.view(np.int32) != mu.view(np.int32)),
        "mismatch/abs_diff_max": _max(difference),
        "mismatch/abs_diff_mean": _mean(difference),
    }


def rollout_kl(log_ratio: NDArray[np.float64]) -> dict[str, float]:
    """Three estimates of KL(mu, pi) from tokens sampled from mu (Schulman 2020, "Approximating KL divergence").

    rollout_kl/k1  mean -d            unbiased, of either sign
    rollout_kl/k2  mean d^2 / 2       biased, >= 0
    rollout_kl/k3  mean exp(d) - 1 - d  unbiased, >= 0
    """
    return {
        "rollout_kl/k1": _mean(-log_ratio),
        "rollout_kl/k2": _mean(log_ratio**2 / 2),
        "rollout_kl/k3": _mean(np.expm1(log_ratio) - log_ratio),
    }


def importance(log_ratio: NDArray[np.float64]) -> dict[str, float]:
    """How uneven the importance weights are, over all n action tokens.

    is/chi2       mean w^2 - 1, the chi-square divergence of pi from mu
    is/renyi3     (1/2) log mean w^3, the order-3 Renyi divergence of pi from mu
    is/ess        (sum w)^2 / (n sum w^2), the effective sample size as a fraction of n
    is/ratio_max  max w
    """
    if len(log_ratio) == 0:
        return {"is/chi2": 0.0, "is/renyi3": 0.0, "is/ess": 0.0, "is/ratio_max": 0.0}
    w = np.exp(log_ratio)
    return {
        "is/chi2": _mean(w**2) - 1,
        "is/renyi3": float(np.log(_mean(w**3)) / 2),
        "is/ess": float(w.sum() ** 2 / (len(w) * (w**2).sum())),
        "is/ratio_max": _max(w),
    }


def lag(versions: NDArray[np.int32], version: int) -> dict[str, float]:
    """Age of the tokens: ``version`` minus the version that sampled each, in versions.

    lag/mean  mean;  lag/max  largest;  lag/p99  smallest lag that at least 99% of the tokens do not exceed

    Raises:
        ValueError: a token without a version, or from a version that the learner has not reached.
    """
    ages = version - versions.astype(np.int64)
    if len(ages) and (versions.min() < 0 or ages.min() < 0):
        raise ValueError(
            f"action tokens of versions {versions.min()} to {versions.max()} in the update of version {version}; "
            "each has to lie between 0 and that"
        )
    p99 = float(np.quantile(ages, 0.99, method="inverted_cdf")) if len(ages) else 0.0
    return {"lag/mean": _mean(ages), "lag/max": _max(ages), "lag/p99": p99}


def responses(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Outcome over the B responses of the update.

    reward/mean              (1/B) sum_i R_i; a failed response counts, with its recorded reward
    reward/pass@1            fraction with R_i >= 1
    response/length_mean     (1/B) sum_i T_i, T_i the action tokens of response i, the end token among them
    response/truncated_frac  fraction that ended by the length limit
    response/failed_frac     fraction recorded as failed
    response/action_tokens   sum_i T_i
    """
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    lengths = np.array([rollout.action_tokens for rollout in rollouts], dtype=np.int64)
    return {
        "reward/mean": _mean(rewards),
        "reward/pass@1": _mean(rewards >= 1),
        "response/length_mean": _mean(lengths),
        "response/truncated_frac": _mean([rollout.finish_reason == "length" for rollout in rollouts]),
        "response/failed_frac": _mean([rollout.finish_reason == "failed" for rollout in rollouts]),
        "response/action_tokens": float(lengths.sum()),
    }


def entropy(entropies: NDArray[np.float32]) -> dict[str, float]:
    """entropy: mean over action tokens of H_t = -sum_v pi(v | h_t) log pi(v | h_t), over the vocabulary, in nats."""
    return {"entropy": _mean(entropies)}


def update_metrics(
    rollouts: Sequence[Rollout],
    logprobs: Sequence[NDArray[np.float32]],
    entropies: Sequence[NDArray[np.float32]],
    version: int,
) -> dict[str, float]:
    """Every metric of this file for one update.

    Args:
        rollouts: the B responses.
        logprobs: the learner's log-prob of each token, float32, aligned with ``Rollout.tokens``; 0 where not an action.
        entropies: H_t for each token in nats, float32, aligned likewise.
        version: weight version that the update consumes.

    Raises:
        ValueError: arrays that do not fit the responses, or a value at an action token that is not finite.
        TypeError: log-probs that are not float32.
    """
    pi, mu, versions = _action_tokens(rollouts, logprobs)
    entropies = _gather(rollouts, "entropies", entropies, np.float32)
    log_ratio = pi.astype(np.float64) - mu.astype(np.float64)
    return {
        **responses(rollouts),
        **lag(versions, version),
        **mismatch(pi, mu, versions, version),
        **rollout_kl(log_ratio),
        **importance(log_ratio),
        **entropy(entropies),
    }


def mismatch_metrics(
    rollouts: Sequence[Rollout], logprobs: Sequence[NDArray[np.float32]], version: int
) -> dict[str, float]:
    """``mismatch`` alone, for responses that are scored and not trained on; arguments and errors of update_metrics."""
    return mismatch(*_action_tokens(rollouts, logprobs), version)


def _action_tokens(
    rollouts: Sequence[Rollout], logprobs: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]:
    """log pi, log mu and version of every action token, end to end."""
    behaviour, versions = [r.logprobs for r in rollouts], [r.versions for r in rollouts]
    return (
        _gather(rollouts, "logprobs", logprobs, np.float32),
        _gather(rollouts, "behaviour log-probs", behaviour, np.float32),
        _gather(rollouts, "versions", versions, np.int32),
    )


def _gather(rollouts: Sequence[Rollout], name: str, arrays: Sequence[NDArray], dtype: type) -> NDArray:
    """The entries at action tokens, end to end and checked; ``dtype`` is that of the empty result."""
    if len(arrays) != len(rollouts):
        raise ValueError(f"{name} has {len(arrays)} arrays for {len(rollouts)} responses")
    for rollout, array in zip(rollouts, arrays, strict=True):
        if array.shape != rollout.tokens.shape:
            raise ValueError(f"{rollout.name}: {name} has shape {array.shape} for {len(rollout.tokens)} tokens")
        odd = np.flatnonzero(~np.isfinite(array) & rollout.action_mask)
        if len(odd):
            raise ValueError(f"{rollout.name}: {name} is {array[odd[0]]} at token {odd[0]}; it has to be finite")
    parts = [array[rollout.action_mask] for rollout, array in zip(rollouts, arrays, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
