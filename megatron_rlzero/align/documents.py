"""What both sides run: random tokens, with lengths on every side of the ends of tiles, pages and chunks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from megatron_rlzero.kernels import tiles
from megatron_rlzero.rollout import Rollout

#: tokens of each answer of the engine; it also scores prompt and answer as a prompt, which takes one token more
NEW = 16
#: prompts that are also sampled alone
ALONE = 4
#: responses of a training step, and the longest of them
RESPONSES, LONGEST = 12, 48


def prompts(vocab_size: int, positions: int) -> list[list[int]]:
    """About twenty, the last four with 150 tokens or more in common; none is longer than the model's positions."""
    draw = random.Random(0)
    chunk, page = tiles.CHUNK, tiles.KEYS
    lengths = [1, 2, 7, 17, 33, chunk - 1, chunk, chunk + 1, page - 1, page, page + 1, 2 * chunk + 5, 3 * chunk + 5]
    longest = positions - NEW - 1
    shared = _tokens(draw, max(min(150, longest - 4), 1), vocab_size)
    found = [_tokens(draw, n, vocab_size) for n in lengths if n <= longest]
    return found + [shared + _tokens(draw, i, vocab_size) for i in range(1, 5)]


def _tokens(draw: random.Random, n: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(n)]


@dataclass(frozen=True)
class Responses:
    """Random responses to train on; ``advantages`` of both signs."""

    rollouts: list[Rollout]
    advantages: np.ndarray


def responses(vocab_size: int, positions: int) -> Responses:
    """Of uneven lengths; one has no action token, one nothing but its last. mu is near that of an even choice."""
    draw, made = np.random.default_rng(0), []
    for i in range(RESPONSES):
        n = int(draw.integers(4, min(LONGEST, positions)))
        first = {1: n, 2: n - 1}.get(i, int(draw.integers(1, n)))
        action = np.arange(n) >= first
        log_mu = np.where(action, draw.uniform(-0.5, 0.5, n) - math.log(vocab_size), 0).astype(np.float32)
        tokens = draw.integers(0, vocab_size, n).astype(np.int32)
        versions = np.where(action, 0, -1).astype(np.int32)
        made.append(Rollout(0, i, 0, tokens, action, log_mu, versions, 0.0, "stop"))
    return Responses(made, np.linspace(-1.5, 1.0, RESPONSES).astype(np.float32))
