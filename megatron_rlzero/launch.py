"""Starts the learner ranks of one machine through torch's elastic launcher; torchrun does the same outside."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_rlzero.network import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

#: how the runs that ``launch`` starts are called, before the launcher's process id
RUN = "megatron-rlzero-"
#: in the environment of the ranks that ``launch`` starts: the port of their store, on loopback
STORE = "MEGATRON_RLZERO_STORE"


def is_rank() -> bool:
    """Whether this process was started as a rank, by ``launch`` or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_here() -> bool:
    """Whether ``launch`` started this rank, and not torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(RUN)


def launcher() -> int:
    """Process id of the launcher of this rank; also where it has died before this call."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return int(name.removeprefix(RUN).split("-")[0]) if launched_here() else os.getppid()


def loopback_store() -> TCPStore:
    """A store that only processes of this machine can reach; its port is free as long as it lives."""
    from torch.distributed import TCPStore

    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        host, port = listener.getsockname()
        return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def ranks_store(timeout: timedelta = timedelta(minutes=30)) -> tuple[Store, int, int]:
    """The store of all ranks, this rank and their number, as the environment names them.

    Args:
        timeout: for the store's answers; by default torch's own, since a conversion's ranks wait for each other so.
    """
    if not launched_here():
        from torch.distributed import rendezvous

        return next(rendezvous("env://", timeout=timeout))
    from torch.distributed import TCPStore

    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", STORE))
    return TCPStore(LOOPBACK, port, None, False, timeout), rank, size


def launch(arguments: Sequence[str], world_size: int) -> int:
    """Runs ``python ARGUMENTS`` as ``world_size`` ranks and waits for them.

    When one fails the others are ended; the returned exit code is that of the first that failed, 0 if none did.
    """
    with tempfile.TemporaryDirectory(prefix=RUN) as private:
        return _launch(arguments, world_size, f"{private}/rendezvous")


def _launch(arguments: Sequence[str], world_size: int, rendezvous: str) -> int:
    """``rendezvous``: a file that only this user can reach."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"{RUN}{os.getpid()}-{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        rdzv_configs={"store_type": "file"},
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.2,
    )
    # The ranks say themselves what went wrong; the launcher would add a page on processes.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # A store of torch's listens on every interface, and its launcher unpickles what lies there: it gets a file, and the
    # ranks a store on loopback, which is there before them.
    store = loopback_store()
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", STORE: str(store.port)}
    # Megatron-Core warns of each fused kernel that is not installed, in every rank.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        elastic_launch(settings, sys.executable)(*arguments)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0
