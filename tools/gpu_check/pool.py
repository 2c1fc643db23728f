"""Runs jobs in processes of their own, a few at a time, so that one that breaks its GPU's context breaks no other."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tools.gpu_check.jobs import describe, jobs, run
from tools.gpu_check.sizes import DEVICE

#: exit status of a process in which a job has failed: a fresh one does the rest
SPENT = 70
#: seconds that a job may take
PATIENCE = 200.0
_spawn = multiprocessing.get_context("spawn")


class _Worker:
    """A process that does the jobs ``left``, the first of them now."""

    def __init__(self, left: list[str], begin_before: float) -> None:
        self.left, self.since = left, time.monotonic()
        self.here, there = _spawn.Pipe()
        self.process = _spawn.Process(target=_work, args=(there, left, begin_before), daemon=True)
        self.process.start()
        there.close()


def results(groups: Sequence[Sequence[str]], workers: int, begin_before: float, end: float) -> Iterator[dict[str, Any]]:
    """What each job found, as they finish. A group's jobs, given by key, are done one after the other.

    Args:
        workers: groups at a time.
        begin_before: seconds of ``time.monotonic`` from which on no job begins; end: when those that run are ended.

    A job that time did not allow has ``ok`` None.
    """
    known = {job.key: job for job in jobs()}
    waiting, active = [list(group) for group in groups], list[_Worker]()

    def unfinished(key: str, ok: bool | None, why: str) -> dict[str, Any]:
        return {**describe(known[key]), "ok": ok, "checks": [], "error": why, "seconds": 0.0}

    while waiting or active:
        while waiting and len(active) < workers:
            active.append(_Worker(waiting.pop(0), begin_before))
        ready = wait([worker.here for worker in active], timeout=1.0)
        for worker in list(active):
            if worker.here in ready:
                try:
                    result = worker.here.recv()
                    worker.left, worker.since = worker.left[1:], time.monotonic()
                    yield result
                    continue
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    why = f"the process ended with exit status {worker.process.exitcode}"
                    failed = worker.process.exitcode not in (0, SPENT)
            elif time.monotonic() > end or time.monotonic() - worker.since > PATIENCE:
                worker.process.kill()
                worker.process.join()
                why = f"ended after {time.monotonic() - worker.since:.0f} s"
                failed = time.monotonic() <= end
            else:
                continue
            active.remove(worker)
            worker.here.close()
            left = worker.left
            if left and failed:
                yield unfinished(left[0], False, why)
                left = left[1:]
            if time.monotonic() > begin_before:
                yield from (unfinished(key, None, "no time was left") for key in left)
            elif left:
                waiting.insert(0, left)


def _work(there: Connection, keys: Sequence[str], begin_before: float) -> None:
    known = {job.key: job for job in jobs()}
    for key in keys:
        if time.monotonic() > begin_before:
            return
        result = run(known[key])
        there.send(result)
        if DEVICE.type == "cuda":
            if result["error"]:
                os._exit(SPENT)
            torch.cuda.empty_cache()
