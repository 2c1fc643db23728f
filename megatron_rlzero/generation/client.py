"""The client process: samples every prompt when its time has come, has it graded, and hands over whole updates.

It talks with rank 0 over a pipe (``python -m megatron_rlzero.generation.client FD``). From rank 0: first
(Config, URLs), then ("version", v), ("evaluate", id, greedy, prompts, samples, concurrency), ("detach", url) or
("close",). To rank 0: ("ready",), ("update", u, rollouts), ("evaluation", id, rollouts), ("error", text). It imports
neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import TracebackType

import aiohttp
import numpy as np

from megatron_rlzero import environments
from megatron_rlzero.config import Config
from megatron_rlzero.environments.prompts import decode_response, encode_prompt, load_tokenizer
from megatron_rlzero.generation import http, requests, token
from megatron_rlzero.generation.grading import Graders
from megatron_rlzero.generation.schedule import Prompt, prompts_of_update
from megatron_rlzero.rollout import Rollout

#: pause before a response is sampled again, in seconds, times the number of attempts so far
BACKOFF_S = 0.5
#: the epoch of held-out prompts in noise keys, and their update
EVALUATION = -1


class BadRequest(RuntimeError):
    """The server refuses the request itself: sampling it again would not help."""


class Client:
    """One event loop; a task per update, below it a task per response."""

    def __init__(
        self, config: Config, urls: list[str], connection: Connection, outbox: queue.SimpleQueue[tuple | None]
    ) -> None:
        self.config = config
        self.connection = connection
        self.outbox = outbox
        self.in_flight = dict.fromkeys(urls, 0)
        self.tokenizer = load_tokenizer(config.model.path)
        self.ends = requests.end_tokens(config.model.path, self.tokenizer.eos_token_id)
        self.environments = {split: environments.build(config.environment, split) for split in ("train", "eval")}
        self.version: int | None = None
        self.version_changed = asyncio.Condition()

    async def run(self) -> None:
        """Ends the process when rank 0 says close or is gone; raises what any task raises."""
        self.graders = Graders(self.config.environment)
        closed = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)  # the server closes idle ones after 5 s
        patience = aiohttp.ClientTimeout(total=None, sock_connect=30.0)  # a long generation is no fault
        async with (
            aiohttp.ClientSession(connector=connector, timeout=patience, headers=http.HEADERS) as self.session,
            asyncio.TaskGroup() as self.tasks,
        ):
            asyncio.get_running_loop().add_reader(self.connection.fileno(), self._receive, closed)
            self.tasks.create_task(self._produce())
            self.outbox.put(("ready",))
            await closed.wait()
            os._exit(0)  # what is in flight has no reader any more

    def _receive(self, closed: asyncio.Event) -> None:
        try:
            kind, *arguments = self.connection.recv()
        except (EOFError, OSError):
            kind, arguments = "close", []
        if kind == "version":
            self.tasks.create_task(self._set_version(*arguments))
        elif kind == "evaluate":
            self.tasks.create_task(self._evaluate(*arguments))
        elif kind == "detach":
            self.in_flight.pop(arguments[0], None)
        else:
            closed.set()

    async def _set_version(self, version: int) -> None:
        async with self.version_changed:
            self.version = version
            self.version_changed.notify_all()

    async def _produce(self) -> None:
        """Starts every update as soon as the servers' version allows; the first is that of the first version."""
        async with self.version_changed:
            await self.version_changed.wait_for(lambda: self.version is not None)
        for update in range(self.version, self.config.loop.updates):
            async with self.version_changed:
                await self.version_changed.wait_for(lambda u=update: self.version >= u - self.config.loop.max_lag)
            self.tasks.create_task(self._update(update))

    async def _update(self, update: int) -> None:
        loop = self.config.loop
        prompts = prompts_of_update(self.config.seed, len(self.environments["train"]), loop.prompts_per_update, update)
        work = [(prompt, sample) for prompt in prompts for sample in range(loop.samples_per_prompt)]
        rollouts = await self._respond_all(f"update {update}", "train", update, work, greedy=False)
        self.outbox.put(("update", update, rollouts))

    async def _evaluate(self, request: int, greedy: bool, prompts: int, samples: int, concurrency: int) -> None:
        size = min(prompts, len(self.environments["eval"]))
        work = [(Prompt(EVALUATION, item), sample) for item in range(size) for sample in range(samples)]
        rollouts = await self._respond_all("evaluation", "eval", EVALUATION, work, greedy, concurrency)
        self.outbox.put(("evaluation", request, rollouts))

    async def _respond_all(
        self, name: str, split: str, update: int, work: list[tuple[Prompt, int]], greedy: bool, concurrency: int = 0
    ) -> list[Rollout]:
        """All responses, sorted by (item, sample).

        Raises:
            RuntimeError: more of them failed than ``rollout.max_failed_fraction`` allows.
        """
        reasons: list[str] = []
        turns = asyncio.Semaphore(concurrency or len(work))

        async def respond(prompt: Prompt, sample: int) -> Rollout:
            async with turns:
                return await self._respond(split, update, prompt, sample, greedy, reasons)

        rollouts = await asyncio.gather(*(respond(prompt, sample) for prompt, sample in work))
        failed = sum(rollout.finish_reason == "failed" for rollout in rollouts)
        if failed > self.config.rollout.max_failed_fraction * len(rollouts):
            raise RuntimeError(
                f"{name}: {failed} of {len(rollouts)} responses failed, more than rollout.max_failed_fraction = "
                f"{self.config.rollout.max_failed_fraction}; the last failure: {reasons[-1]}"
            )
        return sorted(rollouts, key=lambda rollout: (rollout.item, rollout.sample))

    async def _respond(
        self, split: str, update: int, prompt: Prompt, sample: int, greedy: bool, reasons: list[str]
    ) -> Rollout:
        """One response; after the last retry or the deadline one that is recorded as failed."""
        rollout = self.config.rollout
        deadline = asyncio.get_running_loop().time() + rollout.deadline_s
        start = time.monotonic()
        tokens = self._encode(split, prompt.item)
        key = None if greedy else (self.config.seed, prompt.epoch, prompt.item, sample)
        attempt = 0
        while attempt <= rollout.max_retries:
            attempt += 1
            name = f"{split}-{update}-{prompt.epoch}-{prompt.item}-{sample}-{attempt}"
            try:
                async with asyncio.timeout_at(deadline):
                    answer = await self._sample(name, tokens, key)
                text, finished = decode_response(self.tokenizer, answer.tokens.tolist(), self.ends)
                reward = await self.graders.grade(split, prompt.item, text, finished, deadline)
            except (aiohttp.ClientError, requests.BadAnswer) as error:  # the first is a TimeoutError at times
                reasons.append(f"{name}: {error!r}")
                await asyncio.sleep(BACKOFF_S * attempt)
                continue
            except TimeoutError:
                reasons.append(f"{name}: not done after rollout.deadline_s = {rollout.deadline_s}")
                break
            return _rollout(update, prompt.item, sample, tokens, answer, reward, attempt, start)
        return _rollout(update, prompt.item, sample, tokens, None, 0.0, attempt, start)

    def _encode(self, split: str, item: int) -> list[int]:
        try:
            problem = self.environments[split].problem(item)
            return encode_prompt(self.tokenizer, problem, self.config.rollout.max_prompt_tokens)
        except ValueError as error:
            raise ValueError(f"{split} item {item}: {error}") from error

    async def _sample(self, name: str, tokens: list[int], key: tuple[int, ...] | None) -> requests.Answer:
        """Asks the server with the fewest requests in flight."""
        rollout = self.config.rollout
        body = requests.body(name, tokens, key, rollout.temperature, rollout.max_response_tokens, self.ends)
        url = min(self.in_flight, key=self.in_flight.__getitem__)
        self.in_flight[url] += 1
        try:
            async with self.session.post(url + requests.ROUTE, json=body) as response:
                if 400 <= response.status < 500:
                    raise BadRequest(f"{url} refuses {name}: HTTP {response.status}: {await response.text()}")
                if response.status != 200:
                    raise requests.BadAnswer(f"HTTP {response.status}: {(await response.text())[:300]}")
                answer = await response.json()
        finally:
            if url in self.in_flight:
                self.in_flight[url] -= 1
        return requests.parse(answer, rollout.max_response_tokens, self.ends)


def _rollout(
    update: int,
    item: int,
    sample: int,
    prompt: list[int],
    answer: requests.Answer | None,
    reward: float,
    attempts: int,
    start: float,
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
    reason = "failed" if answer is None else answer.finish_reason
    info = {"start": start, "end": time.monotonic()}
    return Rollout(update, item, sample, **rows, reward=reward, finish_reason=reason, attempts=attempts, info=info)


def _send(connection: Connection, outbox: queue.SimpleQueue[tuple | None]) -> None:
    """Rank 0 reads when it wants an update; a full pipe must not hold up the event loop."""
    while (message := outbox.get()) is not None:
        connection.send(message)


def main() -> None:
    """Exit code 1 after an error, of which rank 0 is told first, whatever it is."""
    connection = Connection(int(sys.argv[1]))
    outbox: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(connection, outbox), daemon=True)
    sender.start()

    def die(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        outbox.put(("error", f"{type(error).__name__}: {error}"))
        outbox.put(None)
        sender.join()
        os._exit(1)  # grading processes may hang; they end with this one

    sys.excepthook = die
    config, urls = connection.recv()
    token.use(config.rollout.token_file)
    asyncio.run(Client(config, urls, connection, outbox).run())


if __name__ == "__main__":
    main()
