"""Rewards in processes of their own: one that hangs on a response until the deadline, or ends over it, is replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron_rlzero import environments
from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.generation.requests import BadAnswer
from megatron_rlzero.watch import end_with

#: grading processes; a reward takes about a millisecond, but a hanging one holds its process until the deadline
GRADERS = 2

_config: EnvironmentConfig
_environments: dict[str, environments.Environment] = {}


def _start(config: EnvironmentConfig, parent: int) -> None:
    global _config
    end_with(parent)
    _config = config


def _grade(split: str, item: int, response: str, finished: bool) -> float:
    """Runs in a grading process, in its main thread; an environment is built when its first response comes."""
    if split not in _environments:
        _environments[split] = environments.build(_config, split)
    try:
        return float(_environments[split].grade(item, response, finished))
    except SystemExit:  # would end the client
        return 0.0


class Graders:
    """GRADERS processes that take one response each at a time."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config
        self.free: asyncio.Queue[ProcessPoolExecutor] = asyncio.Queue()
        for _ in range(GRADERS):
            self.free.put_nowait(self._executor())

    def _executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(self.config, os.getpid()),
        )

    async def grade(self, split: str, item: int, response: str, finished: bool, deadline: float) -> float:
        """The reward; waits for a free process.

        Args:
            deadline: on the event loop's clock, in seconds.

        Raises:
            TimeoutError: not graded by the deadline.
            BadAnswer: the grading process ended over it.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            executor = await self.free.get()
        try:
            async with asyncio.timeout_at(deadline):
                reward = await loop.run_in_executor(executor, _grade, split, item, response, finished)
        except BrokenProcessPool as error:
            executor.shutdown(wait=False)
            executor = self._executor()
            raise BadAnswer("the grading process ended: killed, out of memory, or by the scorer's libraries") from error
        except TimeoutError:
            for pid in list(executor._processes):  # the executor's own shutdown would wait for it
                os.kill(pid, signal.SIGKILL)
            executor.shutdown(wait=False, cancel_futures=True)
            executor = self._executor()
            raise
        finally:
            self.free.put_nowait(executor)
        return reward
