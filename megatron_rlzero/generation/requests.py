"""A request to vLLM's token-in, token-out route, and its answer, checked: nothing is left to the server's choice."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rlzero.generation.versions import token_versions

ROUTE = "/inference/v1/generate"
#: our entry of a request's ``extra_args``; generation/logits_processor.py reads it
ARGUMENT = "megatron_rlzero"
#: what the server writes for a log-prob that is -inf or not a number
FLOOR = -9999.0


class BadAnswer(ValueError):
    """An answer that cannot be trained on: sampled again, then recorded as failed."""


@dataclass(frozen=True)
class Answer:
    """One sampled response: int32, float32 and int32 [n], and "stop" or "length"."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str


def end_tokens(path: str | Path, tokenizer_end: int | None) -> frozenset[int]:
    """Tokens that end a response: those of generation_config.json and config.json, and the tokenizer's.

    Raises:
        ValueError: there is none, so that every response would run into the length limit.
    """
    found = set() if tokenizer_end is None else {tokenizer_end}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if not found:
        raise ValueError(
            f"model.path = {path}: neither configuration nor tokenizer names an end token; set eos_token_id"
        )
    return frozenset(found)


def body(
    request_id: str,
    prompt: Sequence[int],
    key: Sequence[int] | None,
    temperature: float,
    max_tokens: int,
    ends: Collection[int],
) -> dict[str, Any]:
    """The JSON of one request; ``key`` None is greedy. Every field that could change the draw is pinned."""
    return {
        "request_id": request_id,
        "token_ids": list(prompt),
        "stream": False,
        "sampling_params": {
            "n": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": 0.0,  # the draw is in our logits processor, by the key
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": None,
            "stop": [],
            "stop_token_ids": sorted(ends),
            "ignore_eos": True,  # vLLM's own choice of an end token; ours are the stop tokens above
            "max_tokens": max_tokens,
            "min_tokens": 0,
            "logprobs": 0,  # the sampled token alone
            "prompt_logprobs": None,
            "detokenize": False,
            "logit_bias": None,
            "allowed_token_ids": None,
            "bad_words": [],
            "structured_outputs": None,
            "extra_args": {ARGUMENT: {"key": None if key is None else list(key), "temperature": temperature}},
        },
    }


def parse(answer: Any, max_tokens: int, ends: Collection[int]) -> Answer:
    """The answer's single choice; ``answer`` is JSON.

    vLLM writes "stop" also where a response ended without a reason, so that the reason is checked against the
    tokens.

    Raises:
        BadAnswer: says what is wrong with it.
    """
    try:
        (choice,) = answer["choices"]
        tokens, reason = [int(token) for token in choice["token_ids"]], choice["finish_reason"]
        entries = [(entry["token_id"], float(entry["logprob"])) for entry in choice["logprobs"]["content"]]
        spans = choice["weight_versions"] or []
        versions = token_versions(spans, len(tokens))
    except (KeyError, TypeError, ValueError) as error:  # also of token_versions
        raise BadAnswer(f"answer lacks a field or has a bad one ({error!r}): {str(answer)[:300]}") from error
    ended = bool(tokens) and tokens[-1] in ends
    if not ((reason == "stop" and ended) or (reason == "length" and len(tokens) == max_tokens and not ended)):
        raise BadAnswer(f"finish_reason {reason!r} does not fit {len(tokens)} tokens ending in {tokens[-1:]}")
    if len(entries) != len(tokens):
        raise BadAnswer(f"{len(entries)} log-probs for {len(tokens)} tokens")
    if [token for token, _ in entries] != tokens:
        raise BadAnswer("the log-probs are not those of the sampled tokens")
    logprobs = [logprob for _, logprob in entries]
    if not all(math.isfinite(value) and FLOOR < value <= 0.0 for value in logprobs):
        raise BadAnswer(f"log-probs {logprobs} are not all finite and at most 0; are the weights finite?")
    if (np.diff(versions) < 0).any():
        raise BadAnswer(f"weight versions {spans} go back; a server's weights only ever get newer")
    return Answer(np.array(tokens, np.int32), np.array(logprobs, np.float32), versions, reason)


def check_versions(answer: Answer, oldest: int | None, newest: int | None) -> None:
    """Raises BadAnswer where a token is older than version ``oldest`` or newer than ``newest``; None is no bound."""
    first, last = int(answer.versions[0]), int(answer.versions[-1])  # they do not go back
    if oldest is not None and first < oldest:
        raise BadAnswer(f"sampled by version {first}, older than {oldest}, the oldest that loop.max_lag allows")
    if newest is not None and last > newest:
        raise BadAnswer(f"sampled by version {last}, newer than {newest}, the newest that can have been handed over")
