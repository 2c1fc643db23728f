"""Version spans cover every token once, and a switch costs the tokens before it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlzero.generation.requests import BadAnswer, parse
from megatron_rlzero.generation.versions import recomputed_tokens, token_versions
from megatron_rlzero.rollout import Rollout


def span(version: str, start: int, end: int) -> dict:
    return {"version": version, "start": start, "end": end}


def test_spans_become_one_version_per_token() -> None:
    versions = token_versions([span("3", 0, 2), span("5", 2, 3)], 3)
    assert versions.tolist() == [3, 3, 5]
    assert versions.dtype == np.int32


@pytest.mark.parametrize(
    "spans",
    [[], [span("0", 0, 2)], [span("0", 1, 3)], [span("0", 0, 1), span("1", 2, 3)], [span("default", 0, 3)]],
)
def test_incomplete_cover_is_refused(spans: list[dict]) -> None:
    with pytest.raises(ValueError, match="weight"):
        token_versions(spans, 3)


def test_recomputed_tokens() -> None:
    mask = np.array([False, False, True, True, True, True])
    versions = np.array([-1, -1, 4, 4, 5, 7], np.int32)
    rollout = Rollout(0, 0, 0, np.zeros(6, np.int32), mask, np.zeros(6, np.float32), versions, 0.0, "stop")
    same = Rollout(0, 0, 0, np.zeros(6, np.int32), mask, np.zeros(6, np.float32), mask * 5 - 1, 0.0, "stop")
    assert recomputed_tokens([rollout, same]) == 4 + 5
    assert recomputed_tokens([same]) == 0


def answer(tokens: list[int], reason: str | None, logprobs: list[float] | None = None) -> dict:
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
    choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}
    return {"choices": [{**choice, "weight_versions": [span("0", 0, len(tokens))]}]}


def test_answers_are_checked() -> None:
    assert parse(answer([5, 1], "stop"), 4, {1}).finish_reason == "stop"
    assert parse(answer([5, 6, 7, 8], "length"), 4, {1}).versions.tolist() == [0] * 4
    bad = {
        "no reason": answer([5, 1], None),
        "stop without an end token": answer([5, 6], "stop"),
        "length before the limit": answer([5, 6], "length"),
        "abort": answer([5, 6], "abort"),
        "nothing": answer([], "stop"),
        "not a number": answer([5, 1], "stop", [-1.0, -9999.0]),
        "error": {"error": "gone"},
    }
    other = answer([5, 1], "stop")
    other["choices"][0]["logprobs"]["content"][0]["token_id"] = 6
    for case in [*bad.values(), other]:
        with pytest.raises(BadAnswer):
            parse(case, 4, {1})
