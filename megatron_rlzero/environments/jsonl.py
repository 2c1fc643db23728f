"""A file of {"problem": ..., "answer": ...} lines as an environment, graded by math-verify."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.environments.base import DataError, check_item

#: seconds that math-verify may take over one parse or one comparison; it counts whole seconds
TIMEOUT_S = 5
#: bad lines that are listed one by one
LISTED = 20


def _fault(line: str) -> str | None:
    """What is wrong with a line, with its fix; None if nothing is."""
    if not line.strip():
        return "empty; remove it"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg} at column {error.colno}); write one JSON object per line"
    if not isinstance(record, dict):
        return 'not an object; write {"problem": ..., "answer": ...}'
    problem, answer = record.get("problem"), record.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        return f"problem is {problem!r}; give a text that is not empty"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        return f"answer is {answer!r}; give a number or a text that is not empty"
    return None


def read(path: str | Path, key: str) -> list[tuple[str, str]]:
    """(problem, answer) of every line of a UTF-8 file; other fields are ignored.

    Raises:
        DataError: no such file, no lines, or bad lines, each with its number; ``key`` names the file's setting.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError([f"{key} = {path}: {error.strerror}; give a file of problem and answer lines"]) from error
    except UnicodeDecodeError as error:
        raise DataError([f"{key} = {path}: not UTF-8 at byte {error.start}; save it as UTF-8"]) from error
    faults = [(number, fault) for number, line in enumerate(lines, 1) if (fault := _fault(line))]
    violations = [f"{key} = {path}: line {number}: {fault}" for number, fault in faults[:LISTED]]
    if len(faults) > LISTED:
        violations.append(f"{key} = {path}: {len(faults) - LISTED} more bad lines; see those above")
    if not lines:
        violations.append(f"{key} = {path}: no lines; give at least one problem")
    if violations:
        raise DataError(violations)
    records = [json.loads(line) for line in lines]
    return [(record["problem"], str(record["answer"])) for record in records]


class Jsonl:
    """Lines of ``environment.path`` (train) or ``environment.eval_path`` (eval), in file order.

    Reward: 1 if math-verify extracts an answer from the response that equals the line's answer as a mathematical
    expression and the response ended by the end token, else 0. An expression too hard to compare within TIMEOUT_S
    counts as wrong. Answers are mathematics: of a word, math-verify compares the product of its letters.
    """

    def __init__(self, config: EnvironmentConfig, split: str) -> None:
        key, path = ("path", config.path) if split == "train" else ("eval_path", config.eval_path)
        self.records = read(path, f"environment.{key}")
        self.path = path
        self.split = split
        self.template = config.prompt_template

    def __len__(self) -> int:
        return len(self.records)

    def problem(self, item: int) -> str:
        check_item(item, len(self), self.split)
        return self.template.replace("{problem}", self.records[item][0])

    def grade(self, item: int, response: str, finished: bool) -> float:
        """Raises RuntimeError outside a main thread, ValueError where the file's answer cannot be read."""
        check_item(item, len(self), self.split)
        if not finished:
            return 0.0
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("math-verify's time limits are signals; grade in the main thread of a process")
        from math_verify import parse, verify

        answer = self.records[item][1]
        # In a box the whole answer is taken, as LaTeX or plain, not the last number in it.
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=TIMEOUT_S)
        if not gold:
            raise ValueError(f"{self.path}: line {item + 1}: math-verify cannot read the answer {answer!r}; rewrite it")
        found = parse(response, parsing_timeout=TIMEOUT_S)
        return 1.0 if verify(gold, found, timeout_seconds=TIMEOUT_S) else 0.0
