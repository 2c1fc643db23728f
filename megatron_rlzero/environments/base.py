"""The protocol of an environment: an item gives a prompt, a finished response to it gives a reward."""

from __future__ import annotations

from typing import Protocol

SPLITS = ("train", "eval")


class Environment(Protocol):
    """Prompts and their rewards; one turn. Items are integers, so that they travel between processes for free.

    Every process that builds the same environment sees the same items. ``grade`` may be slow or hang on what a
    policy writes: it runs in the main thread of a pool process, under the caller's deadline.
    """

    def __len__(self) -> int:
        """Number of items of this split."""
        ...

    def problem(self, item: int) -> str:
        """What the user turn says, before any chat template. IndexError where there is no such item."""
        ...

    def grade(self, item: int, response: str, finished: bool) -> float:
        """Reward of ``response``, the text without its end token.

        ``finished`` tells whether the response ended by the end token; one cut off by the length limit gets 0.
        """
        ...


class DataError(ValueError):
    """A task or data file that cannot be used; ``violations`` has a line ``key = value: problem; fix`` each."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("\n".join(violations))
        self.violations = violations


def check_item(item: int, size: int, split: str) -> None:
    """IndexError unless 0 <= item < size."""
    if not 0 <= item < size:
        raise IndexError(f"item {item}: the {split} split has items 0 to {size - 1}")
