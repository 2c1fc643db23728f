"""Version spans cover every token once, and a switch costs the tokens before it."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rlzero.generation.requests import BadAnswer, check_versions, parse
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


def changed(**fields: object) -> dict:
    """A good answer of tokens 5, 1 but for these fields of its choice."""
    good = answer([5, 1], "stop")
    return {"choices": [good["choices"][0] | fields]}


def entries(*pairs: tuple) -> dict:
    return {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}


def test_good_answers_are_taken() -> None:
    assert parse(answer([5, 1], "stop"), 4, {1}).finish_reason == "stop"
    assert parse(answer([5, 6, 7, 8], "length"), 4, {1}).versions.tolist() == [0] * 4
    newer = changed(weight_versions=[span("2", 0, 1), span("3", 1, 2)])
    assert parse(newer, 4, {1}).versions.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (answer([5, 1], None), "finish_reason None"),
        (answer([5, 6], "stop"), "finish_reason 'stop' does not fit"),
        (answer([5, 6], "length"), "finish_reason 'length' does not fit"),
        (answer([5, 6], "abort"), "finish_reason 'abort'"),
        (answer([], "stop"), "weight_versions"),
        (answer([5, 1], "stop", [-1.0, -9999.0]), "not all finite"),
        (answer([5, 1], "stop", [-1.0, float("nan")]), "not all finite"),
        (answer([5, 1], "stop", [-1.0, 0.5]), "not all finite and at most 0"),
        ({"error": "gone"}, "lacks a field.*choices"),
        ([], "lacks a field"),
        (None, "lacks a field"),
        ({"choices": []}, "lacks a field"),
        (changed(token_ids=None), "lacks a field"),
        (changed(logprobs=None), "lacks a field"),
        (changed(logprobs={"content": [{"token_id": 5}, {"token_id": 1}]}), "lacks a field.*logprob"),
        (changed(logprobs=entries((5, None), (1, -1.0))), "lacks a field"),
        (changed(logprobs=entries((5, -1.0))), "1 log-probs for 2 tokens"),
        (changed(logprobs=entries((5, -1.0), (5, -1.0), (1, -1.0))), "3 log-probs for 2 tokens"),
        (changed(logprobs=entries((6, -1.0), (1, -1.0))), "not those of the sampled tokens"),
        (changed(weight_versions=None), "do not cover 2 tokens"),
        (changed(weight_versions=[span("3", 0, 1), span("2", 1, 2)]), "go back"),
        (changed(weight_versions=[span("default", 0, 2)]), "is no number"),
    ],
)
def test_bad_answers_are_named(bad: object, reason: str) -> None:
    with pytest.raises(BadAnswer, match=reason):
        parse(bad, 4, {1})


def test_versions_have_bounds() -> None:
    taken = parse(changed(weight_versions=[span("2", 0, 1), span("3", 1, 2)]), 4, {1})
    for oldest, newest in ((2, 3), (None, 3), (2, None), (None, None), (0, 9)):
        check_versions(taken, oldest, newest)
    with pytest.raises(BadAnswer, match="version 2, older than 3"):
        check_versions(taken, 3, 3)
    with pytest.raises(BadAnswer, match="version 3, newer than 2"):
        check_versions(taken, 2, 2)
