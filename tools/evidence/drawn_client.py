"""The rollout client with response lengths that are drawn beforehand, in the place of those that a policy chooses.

``python -m tools.evidence.drawn_client FD KIND MEAN``: the product's client but for two things. A request asks for
exactly the length that its key draws and has no end tokens; so its answer is checked without them, against that length.
KIND is one of KINDS. ``rollout.max_response_tokens`` is the longest. Prompts, noise, queue, retries, grading and what
goes to rank 0 are as they are; so are the log-probs, since nothing is masked out.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from typing import Any

KINDS = ("exponential", "even")
#: a greedy response, which only an evaluation has, is this part of the mean: so one server can be asked for two lengths
GREEDY = 0.25

_length: ContextVar[int] = ContextVar("_length")  # of the request that the present task, of one response, waits for


def draw(kind: str, mean: int, longest: int, key: Sequence[int] | None) -> int:
    """Tokens of the response with this key, from 1 to ``longest``.

    exponential: ceil of an exponential variable of that mean, cut off at ``longest``. even: the mean, always.

    Args:
        key: (seed, epoch, item, sample), as for the sampling noise; None is greedy.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: give one of {', '.join(KINDS)}")
    if key is None:
        return max(1, min(longest, round(GREEDY * mean)))
    if kind == "even":
        return min(longest, mean)
    uniform = random.Random(",".join(map(str, key))).random()  # of a text: the same in every process
    return max(1, min(longest, math.ceil(-mean * math.log1p(-uniform))))


def install(kind: str, mean: int) -> None:
    """Replaces the request and its check in this process."""
    from megatron_rlzero.generation import requests

    body, parse = requests.body, requests.parse

    def drawn_body(
        request_id: str,
        prompt: Sequence[int],
        key: Sequence[int] | None,
        temperature: float,
        max_tokens: int,
        ends: Collection[int],
    ) -> dict[str, Any]:
        _length.set(draw(kind, mean, max_tokens, key))
        return body(request_id, prompt, key, temperature, _length.get(), ())

    def drawn_parse(answer: Any, max_tokens: int, ends: Collection[int]) -> requests.Answer:
        return parse(answer, _length.get(), ())

    requests.body, requests.parse = drawn_body, drawn_parse


def main() -> None:
    from megatron_rlzero.generation import client

    _, _, kind, mean = sys.argv
    install(kind, int(mean))
    client.main()


if __name__ == "__main__":
    main()
