"""Processes that a test looks at and that may end while it does."""

from __future__ import annotations

import psutil


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
