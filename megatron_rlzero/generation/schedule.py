"""Which prompts belong to an update: fixed in advance by seed and data set size, through epochs without a gap."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
