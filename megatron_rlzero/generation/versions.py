"""Which weights sampled which token: vLLM's version spans as one number per token, and what a switch costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_rlzero.rollout import Rollout


def token_versions(spans: Sequence[Mapping[str, str | int]], tokens: int) -> NDArray[np.int32]:
    """int32 [tokens] from spans {"version", "start", "end"}, ``start <= token < end``.

    Raises:
        ValueError: the spans leave a token out, overlap, or name a version that no refit has set.
    """
    versions = np.empty(tokens, dtype=np.int32)
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] <= end:
            raise ValueError(f"weight_versions {list(spans)} do not cover {tokens} tokens one after the other")
        if not str(span["version"]).isdecimal():
            raise ValueError(f"weight version {span['version']!r} is no number; push or label the weights first")
        end = int(span["end"])
        versions[int(span["start"]) : end] = int(span["version"])
    if end != tokens:
        raise ValueError(f"weight_versions {list(spans)} do not cover {tokens} tokens")
    return versions


def recomputed_tokens(rollouts: Iterable[Rollout]) -> int:
    """refit/recomputed_tokens: tokens that were prefilled again because the weights changed under a response.

    Formula: the sum, over responses and over the action tokens t whose version differs from the action token's
    before it, of the number of tokens (prompt and response) before t. A lower bound: several refits between two
    tokens of a response count once, and a refit between the prefill and the first token does not show.
    """
    total = 0
    for rollout in rollouts:
        positions = np.flatnonzero(rollout.action_mask)
        switched = np.diff(rollout.versions[positions]) != 0
        total += int(positions[1:][switched].sum())
    return total
