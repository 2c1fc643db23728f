"""Prompts of an update: every item once an epoch, no gap between epochs, the same in every process."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_rlzero.generation.schedule import Prompt, prompts_of_update


def run(seed: int, size: int, prompts_per_update: int, updates: int) -> list[Prompt]:
    return [prompt for u in range(updates) for prompt in prompts_of_update(seed, size, prompts_per_update, u)]


@pytest.mark.parametrize(("size", "prompts_per_update"), [(12, 4), (10, 4), (3, 7), (1, 5)])
def test_every_item_once_per_epoch_without_a_gap(size: int, prompts_per_update: int) -> None:
    updates = 3 * size
    prompts = run(7, size, prompts_per_update, updates)
    assert [p.epoch for p in prompts] == [n // size for n in range(updates * prompts_per_update)]
    for epoch in range(prompts[-1].epoch):
        assert sorted(p.item for p in prompts if p.epoch == epoch) == list(range(size))
    assert max(Counter(prompts).values()) == 1


def test_an_update_does_not_depend_on_those_before_it() -> None:
    in_order = run(1, 50, 16, 10)
    assert prompts_of_update(1, 50, 16, 9) == in_order[-16:]


def test_seed_and_epoch_change_the_order() -> None:
    first, second = run(1, 100, 100, 2)[:100], run(1, 100, 100, 2)[100:]
    other = run(2, 100, 100, 1)
    items = [[p.item for p in prompts] for prompts in (first, second, other)]
    assert items[0] != items[1]
    assert items[0] != items[2]
    assert items[0] != sorted(items[0])
    assert run(1, 100, 100, 1) == first


def test_order_is_pinned() -> None:
    """A resumed run must see the same prompts after an upgrade of NumPy."""
    assert [p.item for p in prompts_of_update(1, 8, 8, 0)] == PINNED


@pytest.mark.parametrize("arguments", [(-1, 1, 1, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, -1)])
def test_bad_arguments_are_named(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        prompts_of_update(*arguments)


PINNED = [0, 5, 4, 1, 2, 6, 3, 7]
