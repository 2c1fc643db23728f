"""Prompts of an update: every item once an epoch, no gap between epochs, the same in every process."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megatron_rlzero.config import Config
from megatron_rlzero.generation.schedule import (
    Prompt,
    check_complete,
    left_to_sample,
    prompts_of_update,
    responses_of_update,
)
from megatron_rlzero.rollout import Rollout


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


def rollout(item: int, sample: int, version: int = 1, reason: str = "stop") -> Rollout:
    mask = np.array([False, True])
    return Rollout(2, item, sample, mask * 1, mask, mask * -1.0, np.array([-1, version]), 0.0, reason)


def config(prompts: int, samples: int) -> Config:
    made = Config(run_dir="/nowhere", seed=1)
    made.loop.prompts_per_update, made.loop.samples_per_prompt, made.loop.max_lag = prompts, samples, 1
    return made


def test_a_group_with_a_member_missing_is_named() -> None:
    wanted = responses_of_update(config(2, 3), 100, 2)
    whole = [rollout(prompt.item, sample) for prompt, sample in wanted]
    check_complete(2, wanted, whole[::-1])
    item = whole[4].item
    with pytest.raises(RuntimeError, match=rf"update 2: .*missing \[\({item}, 1\)\]$"):
        check_complete(2, wanted, whole[:4] + whole[5:])
    with pytest.raises(RuntimeError, match=rf"missing \[\({item}, 1\)\], extra \[\({item}, 2\)\]"):
        check_complete(2, wanted, [*whole[:4], whole[5], whole[5]])


def test_finished_responses_are_not_sampled_again() -> None:
    made = config(2, 3)
    wanted = responses_of_update(made, 100, 2)
    done = [rollout(prompt.item, sample) for prompt, sample in (wanted[4], wanted[1])]
    kept, left = left_to_sample(made, 2, wanted, done)
    assert kept == done
    assert left == [wanted[n] for n in (0, 2, 3, 5)]
    assert left_to_sample(made, 2, wanted, []) == ([], wanted)
    for wrong in (
        [*done, done[0]],
        [rollout(100, 0)],
        [rollout(done[0].item, 3)],
        [rollout(done[0].item, 1, version=0)],
        [rollout(done[0].item, 1, reason="failed")],
    ):
        with pytest.raises(ValueError, match=r"response \(update 2, item \d+, sample \d\), finished before"):
            left_to_sample(made, 2, wanted, wrong)


def test_of_an_item_in_two_epochs_all_or_no_finished_responses_count() -> None:
    made = config(4, 1)
    wanted = responses_of_update(made, 3, 2)  # 3 items: one comes twice
    ((twice, _),) = Counter(prompt.item for prompt, _ in wanted).most_common(1)
    once = [rollout(prompt.item, 0) for prompt, _ in wanted if prompt.item != twice]
    kept, left = left_to_sample(made, 2, wanted, [*once, rollout(twice, 0)])
    assert kept == once
    assert [prompt.item for prompt, _ in left] == [twice, twice]
    kept, left = left_to_sample(made, 2, wanted, [rollout(twice, 0), rollout(twice, 0)])
    assert len(kept) == 2
    assert twice not in [prompt.item for prompt, _ in left]


PINNED = [0, 5, 4, 1, 2, 6, 3, 7]
