"""Any reasoning-gym task as an environment: items by index, held-out items after the training items."""

from __future__ import annotations

import difflib
import logging
import warnings
from typing import Any

from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.environments.base import DataError, check_item

#: the score of a right answer; every task gives its own answers exactly this, and there is no partial credit
RIGHT = 1.0
DEFAULT_SEED = 0
#: what some scorers raise on text that does not parse as their answer: prime_factorization on "None", for one
SCORER_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

#: tasks whose scorer gives the response to eval(), or to sympy's parse_expr, which calls it; codeio's items are code
EVALUATED = (
    "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
    "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip

log = logging.getLogger(__name__)


def open_task(task: str, parameters: dict[str, Any], size: int) -> Any:
    """reasoning-gym's data set ``task`` with 2 * size items; generates and scores the first as a trial.

    ``parameters`` are its keyword arguments; ``seed`` among them, 0 by default, fixes the items. Item i depends on
    seed + i, so that a data set is the same in every process.

    Raises:
        DataError: no such task, one whose scorer runs responses as code, or parameters that the task refuses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a library that reasoning-gym imports
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise DataError([f"environment.task = {task}: reasoning-gym has no such task; {fix}"])
    if task in EVALUATED:
        others = ", ".join(name for name in EVALUATED if name != task)
        raise DataError(
            [
                f"environment.task = {task}: it runs text that a model wrote as Python code, outside of any sandbox; "
                f"choose another one, but none of {others}"
            ]
        )
    if "size" in parameters:
        raise DataError([f"environment.parameters.size = {parameters['size']}: has its own key; use environment.size"])
    try:
        dataset = reasoning_gym.create_dataset(task, **{"seed": DEFAULT_SEED, **parameters, "size": 2 * size})
        entry = dataset[0]
        dataset.score_answer(entry["answer"], entry)
    except (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # what tasks raise
        known = ", ".join(name for name in DATASETS[task][1].__dataclass_fields__ if name != "size")
        raise DataError(
            [f"environment.parameters = {parameters}: {task} refuses them: {error!r}; it takes {known}"]
        ) from error
    return dataset


class ReasoningGym:
    """Task ``environment.task``. Training items are its items 0 to size - 1.

    The held-out items are those of size to 2 * size - 1 whose question occurs neither in the training range nor
    earlier among the held-out: generators repeat questions. They are looked for as far as they are asked for.

    Reward: 1 if the task's own ``score_answer`` gives exactly 1 and the response ended by the end token, else 0. A
    tolerance would reward wrong answers: spell_backward gives a right word of 6 or 7 letters with more letters after
    it 1 - 2e-16. White space around the response is ignored. A response on which the scorer raises is wrong, and
    logged.
    """

    def __init__(self, config: EnvironmentConfig, split: str) -> None:
        self.dataset = open_task(config.task, config.parameters, config.size)
        self.config = config
        self.split = split
        self.held_out: list[int] = []  # indices of the held-out items found so far
        self.next_candidate = config.size
        self.seen: set[str] = set()
        if split == "eval":
            self.seen.update(self.dataset[index]["question"] for index in range(config.size))

    def __len__(self) -> int:
        if self.split == "train":
            return self.config.size
        self._find(self.config.size)
        return len(self.held_out)

    def problem(self, item: int) -> str:
        return self.config.prompt_template.replace("{problem}", self._entry(item)["question"])

    def grade(self, item: int, response: str, finished: bool) -> float:
        if not finished:
            return 0.0
        entry = self._entry(item)
        try:
            score = self.dataset.score_answer(response.strip(), entry)
        except SCORER_ERRORS as error:
            log.warning("%s could not score %r: %r; reward 0", self.config.task, response, error)
            return 0.0
        return 1.0 if score == RIGHT else 0.0

    def _entry(self, item: int) -> dict[str, Any]:
        if self.split == "train":
            check_item(item, self.config.size, self.split)
            return self.dataset[item]
        self._find(item + 1)
        check_item(item, len(self.held_out), self.split)
        return self.dataset[self.held_out[item]]

    def _find(self, count: int) -> None:
        """Extends ``held_out`` to ``count`` items, or to all there are."""
        while len(self.held_out) < count and self.next_candidate < 2 * self.config.size:
            question = self.dataset[self.next_candidate]["question"]
            if question not in self.seen:
                self.seen.add(question)
                self.held_out.append(self.next_candidate)
            self.next_candidate += 1
