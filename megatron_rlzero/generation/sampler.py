"""One response: asked for, checked, graded; asked for again after a failure, and elsewhere after a server's death."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from megatron_rlzero import environments
from megatron_rlzero.config import Config
from megatron_rlzero.environments.prompts import decode_response, encode_prompt, load_tokenizer
from megatron_rlzero.generation import requests
from megatron_rlzero.generation.grading import Graders
from megatron_rlzero.generation.rotation import Lost, Member, Rotation
from megatron_rlzero.generation.schedule import EVALUATION, Prompt
from megatron_rlzero.rollout import RETRIES_FILE, Rollout

#: pause before a response is sampled again, in seconds, times the number of attempts so far
BACKOFF_S = 0.5


class BadRequest(RuntimeError):
    """The server refuses the request itself: sampling it again would not help."""


@dataclass(frozen=True)
class Task:
    """Which response: of update EVALUATION it is one to a held-out prompt; ``server`` alone may answer, if given."""

    update: int
    prompt: Prompt
    sample: int
    greedy: bool = False
    server: str | None = None

    @property
    def split(self) -> str:
        return "eval" if self.update == EVALUATION else "train"

    @property
    def name(self) -> str:
        return f"{self.split}-{self.update}-{self.prompt.epoch}-{self.prompt.item}-{self.sample}"


class Sampler:
    """Every failed try is a line in RUN_DIR/retries.jsonl.

    Attributes:
        newest: the newest version that servers can hold by now; None before the first is known.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.ends = requests.end_tokens(config.model.path, self.tokenizer.eos_token_id)
        self.environments = {split: environments.build(config.environment, split) for split in ("train", "eval")}
        self.retries = Path(config.run_dir) / RETRIES_FILE
        self.newest: int | None = None

    def start(self, rotation: Rotation) -> None:
        """Starts the grading processes; called in the event loop."""
        self.rotation, self.graders = rotation, Graders(self.config.environment)

    async def respond(self, task: Task, reasons: list[str]) -> Rollout:
        """One response; after the last retry or the deadline one that is recorded as failed, with its ``reasons``.

        The deadline does not run while there is no place at a server. A server's death is no attempt, and the time
        spent there does not count.

        Raises:
            Lost: the one server that may answer is gone.
            BadRequest: a server refuses the request.
        """
        rollout, now = self.config.rollout, asyncio.get_running_loop().time
        deadline, start = now() + rollout.deadline_s, time.monotonic()
        tokens = self._encode(task.split, task.prompt.item)
        attempt, lost = 1, 0
        while True:
            last = attempt > rollout.max_retries
            waited = now()
            server = await self._server(task)
            deadline += now() - waited
            asked = now()
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await self._sample(server, task, f"{attempt + lost}", tokens)
                text, finished = decode_response(self.tokenizer, answer.tokens.tolist(), self.ends)
                reward = await self.graders.grade(task.split, task.prompt.item, text, finished, deadline)
            except Lost as error:
                self._note(task, attempt, str(error), tokens, now() - asked, rerouted=True)
                deadline += now() - asked
                if task.server is not None:
                    raise
                lost += 1
                continue
            except (aiohttp.ClientError, requests.BadAnswer) as error:
                reason = repr(error)
            except TimeoutError:
                reason, last = f"not done after rollout.deadline_s = {rollout.deadline_s}", True
            else:
                return _rollout(task, tokens, answer, reward, attempt, start)
            reasons.append(f"{task.name}: {reason}")
            self._note(task, attempt, reason, tokens, now() - asked)
            if last:
                return _rollout(task, tokens, None, 0.0, attempt, start)
            await asyncio.sleep(BACKOFF_S * attempt)
            attempt += 1

    async def _server(self, task: Task) -> Member:
        """Evaluations come first, since training waits for them, then the oldest update."""
        if task.server is None:
            return await self.rotation.choose(task.update)
        return self.rotation.name(task.server)

    def _encode(self, split: str, item: int) -> list[int]:
        try:
            problem = self.environments[split].problem(item)
            return encode_prompt(self.tokenizer, problem, self.config.rollout.max_prompt_tokens)
        except ValueError as error:
            raise ValueError(f"{split} item {item}: {error}") from error

    async def _sample(self, server: Member, task: Task, number: str, tokens: list[int]) -> requests.Answer:
        rollout = self.config.rollout
        key = None if task.greedy else (self.config.seed, task.prompt.epoch, task.prompt.item, task.sample)
        name = f"{task.name}-{number}"
        body = requests.body(name, tokens, key, rollout.temperature, rollout.max_response_tokens, self.ends)
        status, text = await self.rotation.post(server, requests.ROUTE, body)
        if 400 <= status < 500:
            raise BadRequest(f"{server.url} refuses {name}: HTTP {status}: {text}")
        if status != 200:
            raise requests.BadAnswer(f"HTTP {status}: {text[:300]}")
        try:
            content = json.loads(text)
        except ValueError as error:
            raise requests.BadAnswer(f"not JSON: {text[:300]}") from error
        answer = requests.parse(content, rollout.max_response_tokens, self.ends)
        oldest = None if task.update == EVALUATION else task.update - self.config.loop.max_lag
        requests.check_versions(answer, oldest, self.newest)
        return answer

    def _note(
        self, task: Task, attempt: int, reason: str, tokens: list[int], seconds: float, rerouted: bool = False
    ) -> None:
        line = {
            "update": task.update,
            "item": task.prompt.item,
            "sample": task.sample,
            "attempt": attempt,
            "reason": reason,
            "prompt_tokens": len(tokens),
            "seconds": round(seconds, 3),
        }
        with self.retries.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | ({"rerouted": True} if rerouted else {})) + "\n")


def _rollout(
    task: Task, prompt: list[int], answer: requests.Answer | None, reward: float, attempts: int, start: float
) -> Rollout:
    """The prompt and, unless the response failed, its action tokens."""
    rows = {"tokens": np.array(prompt, np.int32)}
    rows["action_mask"] = np.zeros(len(prompt), bool)
    rows["logprobs"] = np.zeros(len(prompt), np.float32)
    rows["versions"] = np.full(len(prompt), -1, np.int32)
    if answer is not None:
        sampled = {
            "tokens": answer.tokens,
            "action_mask": np.ones(len(answer.tokens), bool),
            "logprobs": answer.logprobs,
            "versions": answer.versions,
        }
        rows = {name: np.concatenate([row, sampled[name]]) for name, row in rows.items()}
    return Rollout(
        task.update,
        task.prompt.item,
        task.sample,
        **rows,
        reward=reward,
        finish_reason="failed" if answer is None else answer.finish_reason,
        attempts=attempts,
        info={"start": start, "end": time.monotonic()},
    )
