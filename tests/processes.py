"""Processes that a test starts or looks at: every wait for one has an end, and one that has gone is no error."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil


def wait_for(condition: Callable[[], object], seconds: float) -> object:
    """The condition's value as soon as it holds; fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
    return result


def run(arguments: Sequence[str | Path], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command in a session of its own and what it printed; after ``seconds`` it is killed and the test fails."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            child.kill() if command(child) else None
        output, errors = process.communicate()
        raise AssertionError(f"{arguments} still runs after {seconds} s:\n{output}{errors}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def command(process: psutil.Process) -> str:
    """Its command line; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def survivors(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after ``timeout_s``; a zombie has ended and waits for its new parent to notice."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in alive if command(process)]
