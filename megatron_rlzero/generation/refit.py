"""The learner's side of a refit: every rank sends its part of the new weights to every server, then they swap."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Store, TCPStore

from megatron_rlzero.generation import http
from megatron_rlzero.generation.rendezvous import REFUSED, join, to_json
from megatron_rlzero.kernels.backend import backend
from megatron_rlzero.network import address
from megatron_rlzero.resharding.layout import Layout
from megatron_rlzero.resharding.plan import Transfer, plan
from megatron_rlzero.resharding.transport import execute

#: seconds that a server's answer may come after the deadline of its own messages
SLACK_S = 5.0


@dataclass(frozen=True)
class RefitStats:
    """``seconds`` on this rank; ``bytes`` that all ranks sent to all servers; servers ``detached`` by name, and why."""

    seconds: float
    bytes: int
    detached: dict[str, str]


@dataclass
class _Link:
    """A server as this rank sees it."""

    name: str
    url: str
    workers: int
    transfers: list[Transfer] = field(default_factory=list)
    group: ProcessGroup | None = None
    store: TCPStore | None = None


class Refit:
    """Pushes a learner's weights into vLLM servers; ``add`` and ``push`` are collective over learner ranks.

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
        self.layout, self.engine = layout, engine
        self.links: list[_Link] = []
        self.agreements = 0
        self.instance = store.add(f"refit/instances/{rank}", 1) if store is not None else 0
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="refit")
        self.links = self._describe(servers)
        self._plan(self.links)
        for link in self.links:
            if fault := self._connect(link):
                raise RuntimeError(f"{link.name} cannot be refitted: {fault}")

    def add(self, servers: Sequence[tuple[str, str, int]]) -> dict[str, str]:
        """Takes further servers in, as the constructor does; the next ``push`` brings them their first weights.

        One whose address another one had takes its place: what was there before is gone.

        Returns:
            Those that were not taken in, because they refuse the plan or are gone, and why, by name.
        """
        faults = {}
        for link in self._describe(servers):
            self.links = [other for other in self.links if other.url != link.url]
            fault = self._agree(lambda link=link: self._absence(link))
            if not fault:
                self._plan([link])
                fault = self._connect(link)
            if fault:
                faults[link.name] = fault
            else:
                self.links.append(link)
        return faults

    def keep(self, names: Sequence[str]) -> None:
        """Forgets all servers but these, which get no further weights. The same on every rank; not collective."""
        self.links = [link for link in self.links if link.name in names]

    def push(self, tensors: Mapping[str, Tensor], version: int, only: Sequence[str] | None = None) -> RefitStats:
        """Replaces every server's weights by ``version``; requests in flight go on with the new weights.

        A server that does not take them by the deadline is detached: it gets no further weights, and the caller
        must send it no further requests. A server that refuses them keeps the old weights and version.

        Args:
            tensors: this rank's tensors by the layout's local names, on any device.
            version: of the weights, at least 0.
            only: names of the servers that get them; None is all. The same on every rank.

        Raises:
            RuntimeError: on every rank: a server refused the weights.
        """
        start = time.monotonic()
        # gloo reads host memory.
        sent = {n: t.detach() if self.backend == "nccl" else t.detach().cpu() for n, t in tensors.items()}
        links = [link for link in self.links if only is None or link.name in only]
        failures = {}
        for link in links:
            try:
                self._push(link, sent, version)
            except (OSError, RuntimeError) as error:
                failures[link.name] = str(error)
        # Rank 0 drives the servers: what it saw decides, and a rank that failed alone stops the run.
        verdict = self._agree(lambda: failures)
        self._check_own(failures, verdict)
        self.links = [link for link in self.links if link.name not in verdict]
        if refusals := [f"{name}: {text}" for name, text in verdict.items() if REFUSED in text]:
            raise RuntimeError(f"refit to version {version} failed: {'; '.join(refusals)}")
        taken = [link for link in links if link.name not in verdict]
        moved = sum(t.box.numel * self.dtypes[t.tensor].itemsize for link in taken for t in link.transfers)
        return RefitStats(time.monotonic() - start, moved, verdict)

    def _check_own(self, failures: Mapping[str, str], verdict: Mapping[str, str]) -> None:
        if own := failures.keys() - verdict.keys():
            raise RuntimeError(f"rank {self.rank}: {'; '.join(f'{name}: {failures[name]}' for name in sorted(own))}")

    def _describe(self, servers: Sequence[tuple[str, str, int]]) -> list[_Link]:
        """Rank 0's list, on every rank."""
        return [_Link(*server) for server in self._agree(lambda: [list(server) for server in servers])]

    def _absence(self, link: _Link) -> str:
        """Rank 0: what is wrong with a server that does not answer; all would wait for it until the deadline."""
        try:
            http.get(f"{link.url}/health", SLACK_S)
        except (OSError, http.ServerError) as error:
            return str(error)
        return ""

    def _plan(self, links: Sequence[_Link]) -> None:
        """One plan for these servers, so that all share the senders' work; each server's group counts from 0."""
        owners = [(link, worker) for link in links for worker in range(link.workers)]
        targets = {link.workers: self.engine(link.workers) for link in links}
        wanted = {self.world_size + i: targets[link.workers][worker] for i, (link, worker) in enumerate(owners)}
        for transfer in plan(self.layout, wanted):
            link, worker = owners[transfer.target - self.world_size]
            link.transfers.append(transfer._replace(target=self.world_size + worker))

    def _push(self, link: _Link, tensors: Mapping[str, Tensor], version: int) -> None:
        """One server: weights are staged while rank 0's request waits for them; the pause is for the swap alone."""
        update = None
        if self.rank == 0:
            self._start(link)
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

    def _start(self, link: _Link) -> None:
        """Opens the server's session, after the one of a run that ended within its refit: vLLM would keep that open."""
        try:
            self._post(link, "/start_weight_update", None)
        except http.ServerError as error:
            if "already active" not in str(error):
                raise
            with suppress(http.ServerError):  # its answer to what it abandons
                self._post(link, "/update_weights", {"update_info": {"abandon": True}})
            self._post(link, "/start_weight_update", None)

    def _connect(self, link: _Link) -> str:
        """Rank 0 listens, tells the other ranks and the server the port, and all join the server's group.

        Returns:
            On every rank: why the server is not in it, in its own words if it has any; empty if it is.
        """
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
                "operators": backend(),
                "deadline_s": self.deadline_s,
            }
            answer = self.threads.submit(self._post, link, "/init_weight_transfer_engine", {"init_info": info})
            self._agree(lambda: [host, port])
        else:
            host, port = self._agree(lambda: None)
            link.store = TCPStore(host, port, None, False, limit)
        fault = {}
        try:
            link.group = join(link.store, self.rank, size, self.backend, self.interface, self.deadline_s)
        except RuntimeError as error:
            fault[link.name] = str(error)
        if answer is not None and (error := answer.exception()) is not None:
            fault[link.name] = str(error)
        verdict = self._agree(lambda: fault)
        self._check_own(fault, verdict)
        return verdict.get(link.name, "")

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
        self.store.wait([key], timedelta(seconds=(1 + len(self.links)) * 2 * (self.deadline_s + SLACK_S)))
        text, taken = self.store.get(key), f"{key}/taken"
        if self.store.add(taken, 1) == self.world_size - 1:  # nobody needs it any more
            self.store.delete_key(key)
            self.store.delete_key(taken)
        return json.loads(text)
