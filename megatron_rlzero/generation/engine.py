"""What rank 0 sees of generation: servers and client as children, rollouts of an update, evaluation, liveness."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, server, token
from megatron_rlzero.generation.server import Server
from megatron_rlzero.rollout import Rollout

#: seconds between two looks at the children while waiting for the client
POLL_S = 0.2
#: seconds between two requests to /health, and the time that each may take
HEALTH_S = 1.0
#: seconds between two lines about a start that is under way
REPORT_S = 10.0


class RolloutEngine:
    """Starts the servers (or attaches to ``rollout.urls``) and the client process. Use ``close`` in a finally."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.servers: list[Server] = []
        self.client: Any = None
        self.messages: dict[tuple[str, int], list[Rollout]] = {}
        self.requests = itertools.count()
        self.health_checked = 0.0
        self.ready = False
        token.use(config.rollout.token_file)
        self.connection, other = Pipe()
        try:
            rollout = config.rollout
            if rollout.urls:
                for index, url in enumerate(rollout.urls):
                    workers = rollout.tensor_model_parallel_size
                    self.servers.append(Server(f"server-{index}", url.rstrip("/"), workers))
            else:
                for index in range(rollout.servers):
                    self.servers.append(server.start(config, index))
            self.client_log = Path(config.run_dir) / "client.log"
            fd = other.fileno()
            self.client = server.spawn(
                "megatron_rlzero.generation.client", [str(fd)], server.base_environment(), self.client_log, (fd,)
            )
        except BaseException:
            self.close()
            raise
        finally:
            other.close()
        self.connection.send((config, [s.url for s in self.servers]))

    def wait_ready(self, report: Callable[[str], None] = print) -> None:
        """Waits for all servers at once and for the client; ``report`` gets a line every REPORT_S and at the end.

        Raises:
            RuntimeError: a server or the client ended, or was not ready after ``rollout.startup_timeout_s``; with
                the end of its log.
        """
        waiting = list(self.servers)
        reported = self.started
        while waiting:
            self._check_processes()
            waiting = [s for s in waiting if not s.healthy(HEALTH_S)]
            seconds = time.monotonic() - self.started
            if waiting and seconds > self.config.rollout.startup_timeout_s:
                raise RuntimeError(
                    f"{waiting[0].name} ({waiting[0].url}) is not ready after rollout.startup_timeout_s = "
                    f"{self.config.rollout.startup_timeout_s}; the end of its log:\n{server.tail(waiting[0].log)}"
                )
            if waiting and time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                report(f"waiting for {', '.join(s.name for s in waiting)}: {seconds:.0f} s")
            if waiting and self.connection.poll(POLL_S):  # ready, or an error that ends the wait
                self._receive()
        for each in self.servers:
            server.check_workers(each)
            server.check_plugin(each)
        while not self.ready:
            self._receive()
        report(f"{len(self.servers)} server(s) ready after {time.monotonic() - self.started:.0f} s")

    def label_weights(self, version: int) -> None:
        """Calls what the servers loaded from ``model.path`` ``version``, where no refit sets it."""
        for each in self.servers:
            http.post(f"{each.url}/update_weight_version", {"new_version": str(version)}, timeout_s=60.0)

    def set_version(self, version: int) -> None:
        """The servers now hold ``version``: prompts of updates up to version + ``loop.max_lag`` may start.

        The first call fixes the first update: that of this version.
        """
        self._send("version", version)

    def detach(self, name: str) -> None:
        """No further request goes to this server; what is in flight there ends there, or is sampled again."""
        (gone,) = [s for s in self.servers if s.name == name]
        self.servers.remove(gone)
        self._send("detach", gone.url)
        if gone.process is not None:
            server.stop([gone.process])

    def take(self, update: int) -> list[Rollout]:
        """All rollouts of ``update``, sorted by (item, sample); waits for them.

        Raises:
            RuntimeError: a server or the client is dead, named with its exit code, or the client reports an error.
        """
        return self._wait(("update", update))

    def evaluate(self, greedy: bool) -> list[Rollout]:
        """One response to each held-out prompt with the servers' weights; training requests go on meanwhile.

        The noise is the same in every evaluation. Raises as ``take`` does.
        """
        return self.finish_evaluation(self.begin_evaluation(greedy, self.config.eval.prompts, 1, 0))

    def begin_evaluation(self, greedy: bool, prompts: int, samples: int, concurrency: int) -> int:
        """Starts ``samples`` responses to each of the first ``prompts`` held-out prompts.

        Args:
            concurrency: at most so many requests at a time; 0 is no limit.

        Returns:
            What ``finish_evaluation`` waits for.
        """
        request = next(self.requests)
        self._send("evaluate", request, greedy, prompts, samples, concurrency)
        return request

    def finish_evaluation(self, request: int) -> list[Rollout]:
        """The responses, sorted by (item, sample). Raises as ``take`` does."""
        return self._wait(("evaluation", request))

    def check_alive(self) -> None:
        """Raises RuntimeError naming a server or client that is dead; looks at /health once in HEALTH_S."""
        self._check_processes()
        if time.monotonic() - self.health_checked < HEALTH_S:
            return
        self.health_checked = time.monotonic()
        for each in self.servers:
            try:
                http.get(f"{each.url}/health", HEALTH_S)
            except TimeoutError:
                pass  # busy; a response has its own deadline
            except (OSError, http.ServerError) as error:
                each.wait_dead(server.GRACE_S)  # a server without its engine ends by itself
                pid = f", pid {each.process.pid}" if each.process is not None else ""
                raise RuntimeError(f"{each.name} ({each.url}{pid}) is not healthy: {error}") from error

    def blame(self, error: BaseException) -> None:
        """Raises RuntimeError naming a server that has ended, as the cause of ``error``; returns where none has.

        A dead server first shows as a failed request: its own end says more than what the request saw.
        """
        try:
            for each in self.servers:
                each.wait_dead(2 * HEALTH_S)
        except RuntimeError as death:
            raise death from error

    def close(self) -> None:
        """Ends the client and the servers that were started; may be called again."""
        self.connection.close()
        children = [self.client, *(s.process for s in self.servers)]
        server.stop([child for child in children if child is not None])

    def _send(self, *message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._client_ended() from error

    def _wait(self, key: tuple[str, int]) -> list[Rollout]:
        while key not in self.messages:
            self._receive()
        return self.messages.pop(key)

    def _receive(self) -> None:
        """Takes in one message of the client, or looks after the children if there is none for POLL_S."""
        if not self.connection.poll(POLL_S):
            self.check_alive()
            return
        try:
            kind, *content = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._client_ended() from error
        if kind == "error":
            error = RuntimeError(f"rollout client: {content[0]}; see {self.client_log}")
            self.blame(error)
            raise error
        if kind == "ready":
            self.ready = True
        else:
            self.messages[kind, content[0]] = content[1]

    def _client_ended(self) -> RuntimeError:
        self.client.wait(server.GRACE_S)
        return RuntimeError(
            f"rollout client {server.how_it_ended(self.client)}; the end of {self.client_log}:\n"
            f"{server.tail(self.client_log)}"
        )

    def _check_processes(self) -> None:
        for each in self.servers:
            each.check_alive()
        if self.client.poll() is not None and not self.connection.poll():
            raise self._client_ended()
