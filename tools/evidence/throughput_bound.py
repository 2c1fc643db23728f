"""How much faster asynchronous training can be than synchronous training, from the server's step time alone.

**The server.** A step decodes one token of each of the b responses that run and takes t(b) = a + c b. Beside its tokens
every response costs r (prefill, request, answer, grading), one after the other, and a batch costs h once. So b
responses of n tokens each, asked for at once, take

    T(b, n) = h + r b + n (a + c b),

which is linear in (h, r, a, c): ``Fit.of`` finds them by least squares of relative errors from measured T.

**Synchronous.** Nothing overlaps: an update takes G_sync + L + R. L is the learner's step, R whatever else its rank
does between two batches (refit, log, checks). G_sync is the time in which B responses of drawn lengths drain: at most S
run at a time, in the order of the schedule; whenever one ends the next one starts; when none is left to start, fewer
and fewer run, and a step gets cheaper by c but never below a (``drain``).

**Asynchronous.** The learner's rank is busy for L + R per update whatever the server does, and the server has to decode
the same tokens, the mean number N of an update. With max_lag K prompts of K + 1 updates are in flight, so that at most
b = min(S, (K + 1) B) run. Time per token, t(b) / b = a / b + c, falls with b; so no schedule decodes N tokens in less
than N t(b) / b, and B responses cost r B on top. Neither can be beaten, and in steady state an update takes as long as
the slower of the two:

    update >= max(N t(b) / b + r B, L + R).

This leaves out what asynchrony costs by itself: the pause of the server while weights are swapped, the keys and values
of the responses in flight, which are computed again after it, and what two busy cores take from one another. So it is
a bound on what any implementation with these parts can reach, and not a prediction. The quotient of the two updates is
the bound on the speed-up. It is at most 1 + G_sync / G_async, where learner and full server take equally long: 2 from
the overlap, and what is above it because the server no longer drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """h, r, a and c in seconds; ``worst`` is the largest relative error at a measured point."""

    h: float
    r: float
    a: float
    c: float
    worst: float = 0.0

    @staticmethod
    def of(points: Sequence[dict[str, float]]) -> Fit:
        """From points {"b", "n", "seconds"}, at least two different b and n.

        Raises:
            ValueError: the points do not determine all four, or give a step time that falls with b or is negative.
        """
        b, n, seconds = (np.array([point[k] for point in points], dtype=float) for k in ("b", "n", "seconds"))
        design = np.stack([np.ones_like(b), b, n, n * b], axis=1) / seconds[:, None]
        found, _, rank, _ = np.linalg.lstsq(design, np.ones_like(b), rcond=None)
        if rank < 4:
            raise ValueError("step times need at least two numbers of responses, each with two lengths")
        h, r, a, c = found.tolist()
        if a <= 0 or c < 0:
            raise ValueError(f"step times give t(b) = {a:.3g} + {c:.3g} b seconds; was the machine busy?")
        return Fit(h, r, a, c, float(np.abs(design @ found - 1).max()))

    def step(self, running: int) -> float:
        """t(b), seconds."""
        return self.a + self.c * running


def drain(lengths: Sequence[int], slots: int, fit: Fit) -> float:
    """G_sync: seconds until responses of these lengths are all there, of which at most ``slots`` run at a time."""
    waiting = list(reversed(lengths))
    running: list[int] = []
    seconds = fit.h + fit.r * len(lengths)
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        steps = min(running)
        seconds += steps * fit.step(len(running))
        running = [left - steps for left in running if left > steps]
    return seconds


def full(tokens: float, responses: int, running: int, fit: Fit) -> float:
    """G_async: seconds for so many tokens in so many responses at a server where ``running`` always run."""
    return fit.r * responses + tokens * fit.step(running) / running


def bound(
    updates: Sequence[Sequence[int]], slots: int, lag: int, fit: Fit, learning: float, rest: float
) -> dict[str, float]:
    """The bound and its parts, seconds per update.

    Args:
        updates: of each update the drawn lengths, B each.
        lag: K.
        learning, rest: L and R.
    """
    batch = len(updates[0])
    tokens = float(np.mean([sum(lengths) for lengths in updates]))
    in_flight = min(slots, (lag + 1) * batch)
    sync = float(np.mean([drain(lengths, slots, fit) for lengths in updates]))
    steady = full(tokens, batch, in_flight, fit)
    slower = max(steady, learning + rest)
    return {
        "tokens": tokens,
        "in_flight": in_flight,
        "G_sync": sync,
        "G_async": steady,
        "L": learning,
        "R": rest,
        "synchronous": sync + learning + rest,
        "asynchronous": slower,
        "speed_up": (sync + learning + rest) / slower,
    }
