"""Which prompts belong to an update: fixed in advance by seed and data set size, through epochs without a gap.

Exactly once is a matter of counting: the responses of an update are compared with what it consists of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rlzero.config import Config
from megatron_rlzero.rollout import Rollout

#: the epoch of held-out prompts in noise keys, and their update
EVALUATION = -1


class Prompt(NamedTuple):
    """One use of an item: each item is used once in every epoch, so that the pair is unique in a run."""

    epoch: int
    item: int


def prompts_of_update(seed: int, size: int, prompts_per_update: int, update: int) -> list[Prompt]:
    """The prompts of update ``update`` (from 0), in the order of the epoch.

    An epoch is a permutation of the ``size`` items of the data set, drawn by NumPy's Philox generator from
    (seed, epoch). Updates take ``prompts_per_update`` prompts each, one after the other; an update may begin in
    one epoch and end in the next, or hold several.

    Raises:
        ValueError: a size or a number of prompts below 1, or a negative update or seed.
    """
    if size < 1 or prompts_per_update < 1 or update < 0 or seed < 0:
        raise ValueError(
            f"size = {size} and prompts_per_update = {prompts_per_update} must be at least 1, "
            f"update = {update} and seed = {seed} at least 0"
        )
    first = update * prompts_per_update
    where = (divmod(position, size) for position in range(first, first + prompts_per_update))
    return [Prompt(epoch, int(_permutation(seed, size, epoch)[offset])) for epoch, offset in where]


@lru_cache(maxsize=4)
def _permutation(seed: int, size: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


def responses_of_update(config: Config, size: int, update: int) -> list[tuple[Prompt, int]]:
    """(prompt, sample) of every response of an update, of a data set of ``size`` items."""
    loop = config.loop
    prompts = prompts_of_update(config.seed, size, loop.prompts_per_update, update)
    return [(prompt, sample) for prompt in prompts for sample in range(loop.samples_per_prompt)]


def check_complete(update: int, wanted: Iterable[tuple[Prompt, int]], rollouts: Iterable[Rollout]) -> None:
    """Raises RuntimeError where the rollouts are not exactly those of the update, naming what is missing or too many.

    An item may come twice in an update, in two epochs.
    """
    expected = Counter((prompt.item, sample) for prompt, sample in wanted)
    found = Counter((rollout.item, rollout.sample) for rollout in rollouts)
    faults = [
        f"{what} {sorted(pairs)}"
        for what, pairs in (("missing", expected - found), ("extra", found - expected))
        if pairs
    ]
    if faults:
        raise RuntimeError(f"update {update}: of its responses, as (item, sample), {', '.join(faults)}")


def left_to_sample(
    config: Config, update: int, wanted: Sequence[tuple[Prompt, int]], finished: Sequence[Rollout]
) -> tuple[list[Rollout], list[tuple[Prompt, int]]]:
    """Those finished responses that count, and what is left of ``wanted`` without them.

    Of an item that comes twice in the update some responses are no use: a response does not say which epoch's it is.

    Raises:
        ValueError: a finished response is none of the update's, is there twice, failed or is too old for it.
    """
    pairs = Counter((prompt.item, sample) for prompt, sample in wanted)
    found = Counter((rollout.item, rollout.sample) for rollout in finished)
    for rollout in finished:
        pair = rollout.item, rollout.sample
        if found[pair] > pairs[pair]:
            raise ValueError(f"{rollout.name}, finished before, is not one of update {update}'s, or is there twice")
        oldest = update - config.loop.max_lag
        if rollout.finish_reason == "failed" or rollout.versions[rollout.action_mask].min() < oldest:
            raise ValueError(f"{rollout.name}, finished before, failed or has tokens older than version {oldest}")
    whole = {pair for pair, count in found.items() if count == pairs[pair]}
    kept = [rollout for rollout in finished if (rollout.item, rollout.sample) in whole]
    return kept, [(prompt, sample) for prompt, sample in wanted if (prompt.item, sample) not in whole]
