"""A child process ends within a second of its parent, whatever ended the parent; also runs a module that way.

``python -m megatron_rlzero.watch PARENT_PID MODULE ARGS...`` is ``python -m MODULE ARGS...`` under the watch from
its first instruction on. What MODULE spawns through multiprocessing imports this small file as its main module, in
place of MODULE, and so is watched from its own start.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

POLL_S = 0.5
PR_SET_PDEATHSIG = 1


def killed_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, and watches as ``end_with`` does.

    For a child of a main thread only: prctl(2), PR_SET_PDEATHSIG. It works where a thread of ours would wait for a
    long import to let go of the interpreter.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with(parent)  # also where the parent was gone before the call above


def end_with(parent: int) -> None:
    """Starts a thread that ends this process as soon as its parent is no longer ``parent`` (a process id).

    The kernel gives an orphan another parent, so that this also holds after a SIGKILL. The exit is immediate:
    a child without its parent has nobody to report to.
    """

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=poll, name="parent-watch", daemon=True).start()


if __name__ == "__mp_main__":  # multiprocessing's name for the main module of a spawned process
    if os.getppid() == 1:  # its parent is gone already
        os._exit(1)
    end_with(os.getppid())

if __name__ == "__main__":
    killed_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__")
