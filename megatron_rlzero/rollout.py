"""A finished response as the loop sees it: tokens, action mask, log-probs and weight version per token, reward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: why a response ended: the end token, the length limit, or a failure after which it has no action tokens
FINISH_REASONS = ("stop", "length", "failed")
#: in a run's directory: a line for each failed try
RETRIES_FILE = "retries.jsonl"


@dataclass
class Rollout:
    """One response to one prompt, with everything the update needs.

    All arrays have one entry per token of prompt and response together, length n.

    Attributes:
        update: the update that this prompt belongs to, fixed in advance; -1 for evaluation.
        item: index of the prompt in its data set.
        sample: which of the prompt's ``samples_per_prompt`` responses this is.
        tokens: int32 [n].
        action_mask: bool [n], True for tokens that the policy sampled. A sampled end token is an action.
        logprobs: float32 [n], natural log of the probability with which the token was sampled, mu; 0
            where it was not sampled.
        versions: int32 [n], weight version that sampled the token; -1 where it was not sampled.
        reward: R.
        finish_reason: one of FINISH_REASONS.
        attempts: how many times it was sampled, more than 1 after failures.
        info: "start" and "end", when it was asked for and when it was graded, on time.monotonic's clock in seconds.
    """

    update: int
    item: int
    sample: int
    tokens: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    reward: float
    finish_reason: str
    attempts: int = 1
    info: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for name in ("action_mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{self.name}: {name} has {len(getattr(self, name))} entries for {n} tokens")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"{self.name}: finish_reason {self.finish_reason!r} is none of {FINISH_REASONS}")

    @property
    def name(self) -> str:
        """How error messages call this response."""
        return f"response (update {self.update}, item {self.item}, sample {self.sample})"

    @property
    def action_tokens(self) -> int:
        """T_i."""
        return int(self.action_mask.sum())
