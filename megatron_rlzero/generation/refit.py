"""The learner's side of a refit: every rank sends its part of the new weights to every server, then they swap."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store, TCPStore

from megatron_rlzero.generation import http
from megatron_rlzero.generation.rendezvous import REFUSED, join, to_json
from megatron_rlzero.kernels import attention
from megatron_rlzero.network import address
from megatron_rlzero.resharding.layout import Layout
from megatron_rlzero.resharding.plan import Transfer, plan
from megatron_rlzero.resharding.transport import execute

#: seconds that a server's answer may come after the deadline of its own messages
SLACK_S = 5.0


@dataclass(frozen=True)
class RefitStats:
    """``seconds`` on this rank; ``bytes`` that all ranks sent to all servers; names of servers ``detached``."""

    seconds: float
    bytes: int
    detached: tuple[str, ...]


@dataclass
class _Link:
    """A server as this rank sees it; ``url`` is set on rank 0."""

    name: str
    url: str
    workers: int
    transfers: list[Transfer] = field(default_factory=list)
    group: ProcessGroup | None = None
    store: TCPStore | None = None


class Refit:
    """Pushes a learner's weights into vLLM servers; constructor and ``push`` are collective over learner ranks.

    Args:
        servers: (name, url, workers) each; rank 0's list counts, the other ranks may pass an empty one.
        rank, world_size: of the learner.
        layout: learner rank -> pieces; every rank passes the whole layout.
        engine: workers of a server -> worker -> the pieces that it wants.
        dtypes: Hugging Face name -> dtype, on both sides and on the wire.
        store: the learner ranks' common store; None is enough for one rank.
        backend: gloo or nccl.
        interface: network interface of this machine and of the servers' over which the weights go.
        deadline_s: for the rendezvous, and for one push to one server.

    Raises:
        ValueError: the layout lacks elements of a tensor, or this machine lacks the interface.
        RuntimeError: a server refuses the plan, or was not there in time.
    """

    def __init__(
        self,
        servers: Sequence[tuple[str, str, int]],
        rank: int,
        world_size: int,
        layout: Layout,
        engine: Callable[[int], Layout],
        dtypes: Mapping[str, torch.dtype],
        store: Store | None,
        backend: str,
        interface: str,
        deadline_s: float,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.dtypes, self.deadline_s = dtypes, deadline_s
        self.store, self.backend, self.interface = store, backend, interface
        self.links: list[_Link] = []
        self.agreements = 0
        self.instance = store.add(f"refit/instances/{rank}", 1) if store is not None else 0
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit")
        described = self._agree(lambda: [list(server) for server in servers])
        self.links = [_Link(*server) for server in described]
        self._plan(layout, engine)
        for link in self.links:
            self._connect(link)

    def push(self, tensors: Mapping[str, Tensor], version: int) -> RefitStats:
        """Replaces every server's weights by ``version``; requests in flight go on with the new weights.

        A server that does not take them by the deadline is detached: it gets no further weights, and the caller
        must send it no further requests. A server that refuses them keeps the old weights and version.

        Args:
            tensors: this rank's tensors by the layout's local names, on any device.
            version: of the weights, at least 0.

        Raises:
            RuntimeError: on every rank: a server refused the weights, or none is left.
        """
        start = time.monotonic()
        # gloo reads host memory.
        sent = {n: t.detach() if self.backend == "nccl" else t.detach().cpu() for n, t in tensors.items()}
        failures = {}
        for link in self.links:
            try:
                self._push(link, sent, version)
            except (OSError, RuntimeError) as error:
                failures[link.name] = f"{link.name}: {error}"
        # Rank 0 drives the servers: what it saw decides, and a rank that failed alone stops the run.
        verdict = self._agree(lambda: failures)
        if own := failures.keys() - verdict.keys():
            raise RuntimeError(f"rank {self.rank}: {'; '.join(failures[name] for name in sorted(own))}")
        self.links = [link for link in self.links if link.name not in verdict]
        refusals = [text for text in verdict.values() if REFUSED in text]
        if refusals or (verdict and not self.links):
            raise RuntimeError(f"refit to version {version} failed: {'; '.join(refusals or verdict.values())}")
        moved = sum(t.box.numel * self.dtypes[t.tensor].itemsize for link in self.links for t in link.transfers)
        return RefitStats(time.monotonic() - start, moved, tuple(verdict))

    def _plan(self, layout: Layout, engine: Callable[[int], Layout]) -> None:
        """One plan for all servers, so that all share the senders' work; each server's group counts from 0."""
        owners = [(link, worker) for link in self.links for worker in range(link.workers)]
        targets = {link.workers: engine(link.workers) for link in self.links}
        wanted = {self.world_size + i: targets[link.workers][worker] for i, (link, worker) in enumerate(owners)}
        for transfer in plan(layout, wanted):
            link, worker = owners[transfer.target - self.world_size]
            link.transfers.append(transfer._replace(target=self.world_size + worker))

    def _push(self, link: _Link, tensors: Mapping[str, Tensor], version: int) -> None:
        """One server: weights are staged while rank 0's request waits for them; the pause is for the swap alone."""
        update = None
        if self.rank == 0:
            self._post(link, "/start_weight_update", None)
            update = self.threads.submit(self._post, link, "/update_weights", {"update_info": {}})
        limit = timedelta(seconds=self.deadline_s)
        try:
            execute(link.transfers, self.rank, link.group, tensors, {}, self.dtypes, limit)
            if self.backend == "nccl":
                torch.cuda.synchronize()  # the optimizer may write to the weights as soon as this returns
        except RuntimeError:
            if update is not None:
                update.result()  # what the server says is the better reason
            raise
        if update is not None:
            update.result()
            self._post(link, "/pause?mode=keep&clear_cache=true", None)  # else tokens see keys of the old weights
            self._post(link, "/finish_weight_update", {"weight_version": str(version)})
            self._post(link, "/resume", None)

    def _connect(self, link: _Link) -> None:
        """Rank 0 listens, tells the other ranks and the server the port, and all join the server's group."""
        size = self.world_size + link.workers
        limit = timedelta(seconds=self.deadline_s)
        answer: Future | None = None
        if self.rank == 0:
            with socket.socket() as listener:
                listener.bind((address(self.interface), 0))
                listener.listen()
                host, port = listener.getsockname()
                link.store = TCPStore(
                    host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
                )
            info = {
                "host": host,
                "port": port,
                "backend": self.backend,
                "interface": self.interface,
                "learners": self.world_size,
                "workers": link.workers,
                "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
                "transfers": to_json(link.transfers),
                "attention": attention.backend(),
                "deadline_s": self.deadline_s,
            }
            answer = self.threads.submit(self._post, link, "/init_weight_transfer_engine", {"init_info": info})
            self._agree(lambda: [host, port])
        else:
            host, port = self._agree(lambda: None)
            link.store = TCPStore(host, port, None, False, limit)
        link.group = join(link.store, self.rank, size, self.backend, self.interface, self.deadline_s)
        refusal = None
        if answer is not None and (error := answer.exception()) is not None:
            refusal = str(error)
        if refusal := self._agree(lambda: refusal):
            raise RuntimeError(f"{link.name} cannot be refitted: {refusal}")

    def _post(self, link: _Link, route: str, body: dict[str, Any] | None) -> None:
        http.post(f"{link.url}{route}", body, self.deadline_s + SLACK_S)

    def _agree(self, value: Callable[[], Any]) -> Any:
        """Rank 0's value, on every rank; JSON. A rank that waits longer than all servers may take raises."""
        if self.world_size == 1:
            return value()
        key = f"refit/{self.instance}/{self.agreements}"
        self.agreements += 1
        if self.rank == 0:
            text = json.dumps(value())
            self.store.set(key, text)
            return json.loads(text)
        self.store.wait([key], timedelta(seconds=len(self.links or [0]) * 2 * (self.deadline_s + SLACK_S)))
        return json.loads(self.store.get(key))
