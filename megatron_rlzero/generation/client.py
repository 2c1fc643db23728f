"""The client process: samples every prompt when its time has come, has it graded, and hands over whole updates.

It talks with rank 0 over a pipe (``python -m megatron_rlzero.generation.client FD``). From rank 0: first
(Config, finished rollouts), then ("version", v), ("evaluate", id, greedy, prompts, samples, concurrency, url or None),
("finished", id, update), ("watch", url), ("attach", url), ("leave", url), ("detach", url, reason) or ("close",). To
rank 0: ("ready", number of training prompts), ("update", u, rollouts), ("evaluation", id, rollouts), ("refused", id,
reason) where the one server of an evaluation is no use, ("finished", id, rollouts), ("lost", url, reason), ("left",
url), ("error", text). It imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType

from megatron_rlzero.config import Config
from megatron_rlzero.generation import token
from megatron_rlzero.generation.rotation import Lost, Rotation, session
from megatron_rlzero.generation.sampler import BadRequest, Sampler, Task
from megatron_rlzero.generation.schedule import EVALUATION, Prompt, left_to_sample, responses_of_update
from megatron_rlzero.rollout import Rollout


class TooManyFailed(RuntimeError):
    """More responses failed than ``rollout.max_failed_fraction`` allows."""


def places(config: Config) -> int:
    """Requests that a server gets at a time: as many as it computes together, and some that may begin at once."""
    return config.rollout.max_num_seqs + max(config.rollout.max_num_seqs // 8, 2)


class Client:
    """One event loop; a task per update, below it a task per response.

    Attributes:
        graded: update -> its responses that are there, until the update is handed over whole.
    """

    def __init__(
        self,
        config: Config,
        finished: Sequence[Rollout],
        connection: Connection,
        outbox: queue.SimpleQueue[tuple | None],
    ) -> None:
        self.config = config
        self.connection = connection
        self.outbox = outbox
        self.sampler = Sampler(config)
        self.size = len(self.sampler.environments["train"])
        self.version: int | None = None
        self.version_changed = asyncio.Condition()
        self.graded: dict[int, list[Rollout]] = {}
        for rollout in finished:
            self.graded.setdefault(rollout.update, []).append(rollout)
        for update, rollouts in self.graded.items():
            left_to_sample(config, update, responses_of_update(config, self.size, update), rollouts)

    async def run(self) -> None:
        """Ends the process when rank 0 says close or is gone; raises what any task raises."""
        closed = asyncio.Event()
        async with session() as self.session, asyncio.TaskGroup() as self.tasks:
            self.rotation = Rotation(self.session, self.tasks, self.outbox.put, places(self.config))
            self.sampler.start(self.rotation)
            asyncio.get_running_loop().add_reader(self.connection.fileno(), self._receive, closed)
            self.tasks.create_task(self._produce())
            self.outbox.put(("ready", self.size))
            await closed.wait()
            os._exit(0)  # what is in flight has no reader any more

    def _receive(self, closed: asyncio.Event) -> None:
        try:
            kind, *arguments = self.connection.recv()
        except (EOFError, OSError):
            kind, arguments = "close", []
        match kind:
            case "version":
                self.tasks.create_task(self._set_version(*arguments))
            case "evaluate":
                self.tasks.create_task(self._evaluate(*arguments))
            case "finished":
                self._tell_finished(*arguments)
            case "watch":
                self.rotation.watch(*arguments)
            case "attach":
                self.rotation.open(*arguments)
            case "leave":
                self.rotation.leave(*arguments)
            case "detach":
                self.rotation.remove(*arguments)
            case _:  # close
                closed.set()

    async def _set_version(self, version: int) -> None:
        async with self.version_changed:
            self.version = version
            # Servers get the next weights before this process hears of them.
            self.sampler.newest = version + self.config.refit.every
            self.version_changed.notify_all()

    def _tell_finished(self, request: int, update: int) -> None:
        rollouts = [rollout for number, graded in self.graded.items() if number >= update for rollout in graded]
        self.outbox.put(("finished", request, rollouts))

    async def _produce(self) -> None:
        """Starts every update as soon as the servers' version allows; the first is that of the first version."""
        async with self.version_changed:
            await self.version_changed.wait_for(lambda: self.version is not None)
        first = self.version
        if before := sorted(update for update in self.graded if update < first):
            raise ValueError(f"finished responses of updates {before}: the run starts with update {first}")
        for update in range(first, self.config.loop.updates):
            async with self.version_changed:
                await self.version_changed.wait_for(lambda u=update: self.version >= u - self.config.loop.max_lag)
            self.tasks.create_task(self._update(update))

    async def _update(self, update: int) -> None:
        wanted = responses_of_update(self.config, self.size, update)
        kept, left = left_to_sample(self.config, update, wanted, self.graded.get(update, []))
        self.graded[update] = list(kept)
        tasks = [Task(update, prompt, sample) for prompt, sample in left]
        rollouts = await self._respond_all(f"update {update}", tasks, kept)
        del self.graded[update]
        self.outbox.put(("update", update, rollouts))

    async def _evaluate(
        self, request: int, greedy: bool, prompts: int, samples: int, concurrency: int, server: str | None
    ) -> None:
        size = min(prompts, len(self.sampler.environments["eval"]))
        tasks = [
            Task(EVALUATION, Prompt(EVALUATION, item), sample, greedy, server)
            for item in range(size)
            for sample in range(samples)
        ]
        try:
            rollouts = await self._respond_all("evaluation", tasks, [], concurrency)
        except* (Lost, BadRequest, TooManyFailed) as errors:
            if server is None:
                raise
            self.outbox.put(("refused", request, f"{errors.exceptions[0]}"))
        else:
            self.outbox.put(("evaluation", request, rollouts))

    async def _respond_all(
        self, name: str, tasks: Sequence[Task], kept: Sequence[Rollout], concurrency: int = 0
    ) -> list[Rollout]:
        """``kept`` and a response to each task, sorted by (item, sample).

        Successful ones of training are also in ``graded`` as soon as they are there.

        Raises:
            TooManyFailed: more of them failed than ``rollout.max_failed_fraction`` allows.
        """
        reasons: list[str] = []
        turns = asyncio.Semaphore(concurrency or len(tasks))

        async def respond(task: Task) -> Rollout:
            async with turns:
                rollout = await self.sampler.respond(task, reasons)
            if task.update != EVALUATION and rollout.finish_reason != "failed":
                self.graded[task.update].append(rollout)
            return rollout

        async with asyncio.TaskGroup() as group:
            responses = [group.create_task(respond(task)) for task in tasks]
        rollouts = [*kept, *(response.result() for response in responses)]
        failed = sum(rollout.finish_reason == "failed" for rollout in rollouts)
        if failed > self.config.rollout.max_failed_fraction * len(rollouts):
            raise TooManyFailed(
                f"{name}: {failed} of {len(rollouts)} responses failed, more than rollout.max_failed_fraction = "
                f"{self.config.rollout.max_failed_fraction}; the last failure: {reasons[-1]}"
            )
        return sorted(rollouts, key=lambda rollout: (rollout.item, rollout.sample))


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
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request has a connection
    config, finished = connection.recv()
    token.use(config.rollout.token_file)
    asyncio.run(Client(config, finished, connection, outbox).run())


if __name__ == "__main__":
    main()
