"""Who the servers are: started, attached or registered; joining, leaving, lost, and started again.

Rank 0's side of it. Until a server is healthy a thread asks for its health; from then on the client does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from subprocess import Popen

from megatron_rlzero.config import Config
from megatron_rlzero.generation import server
from megatron_rlzero.generation.registry import Registry
from megatron_rlzero.generation.server import Server

#: seconds that one request to /health may take
HEALTH_S = 1.0
#: seconds between two requests to /health of a server that is not there yet: one of ours, and another
PERIOD_S, OTHERS_PERIOD_S = 0.2, 2.0


@dataclass(eq=False)
class _Coming:
    """A server that is not healthy yet; ``dropped`` ends the wait for it."""

    server: Server
    since: float = field(default_factory=time.monotonic)
    dropped: threading.Event = field(default_factory=threading.Event)


class Members:
    """Every server of a run is in one of these lists, or gone.

    Args:
        tell: sends a message to the client.

    Attributes:
        servers: requests go to them.
        joining: healthy and checked; whoever brings them the weights calls ``attach`` or ``turn_away``.
        leaving: they answer what they were asked, and get no more.
        coming: not healthy yet.
    """

    def __init__(self, config: Config, tell: Callable[..., None]) -> None:
        self.config, self.tell = config, tell
        self.servers: list[Server] = []
        self.joining: list[Server] = []
        self.leaving: list[Server] = []
        self.coming: list[_Coming] = []
        self.arrivals: queue.SimpleQueue[tuple[_Coming, str]] = queue.SimpleQueue()
        self.registry = Registry(config)
        self.registered: dict[tuple[str, str], Server] = {}  # NAME and URL of a file -> its present server
        self.names: set[str] = set()
        self.restarts = 0
        self.last = "none was there"
        self.alone_since = time.monotonic()  # where there are none, at most since then

    def start(self) -> None:
        """Starts the servers of the configuration, or begins to look for those of ``rollout.urls``."""
        rollout = self.config.rollout
        for index, url in enumerate(rollout.urls):
            self._expect(self._another(f"server-{index}", url.rstrip("/")))
        for index in range(0 if rollout.urls else rollout.servers):
            self._expect(server.start(self.config, index, self._name(f"server-{index}")))

    def processes(self) -> list[Popen]:
        """Of all servers that we started and that are not gone."""
        return [each.process for each in self._all() if each.process is not None]

    def look(self) -> None:
        """Takes note of servers that died, came up, registered or are to leave; cheap."""
        for each in self._all():
            if each.process is not None and each.process.poll() is not None:
                self.lose(each, "it ended")
        for each, fault in self.arrive():
            self._refuse(each, fault)
        for coming in list(self.coming):
            late = time.monotonic() - coming.since > self.config.rollout.startup_timeout_s
            if late and coming.server.process is not None:
                self.lose(coming.server, self.not_ready())
        self._read_registry()

    def not_ready(self) -> str:
        """Why a server that did not come up is given up."""
        return f"not ready after rollout.startup_timeout_s = {self.config.rollout.startup_timeout_s}"

    def arrive(self) -> list[tuple[Server, str]]:
        """Has servers that became healthy join; those that are no use, and why."""
        faults = []
        while not self.arrivals.empty():
            coming, fault = self.arrivals.get()
            if coming not in self.coming:
                continue
            self.coming.remove(coming)
            self.joining.append(coming.server)
            self.tell("watch", coming.server.url)
            if fault:
                faults.append((coming.server, fault))
        return faults

    def attach(self, joined: Server) -> bool:
        """Requests go to it from now on; False, and nothing, where it was lost in between."""
        if joined not in self.joining:
            return False
        self.joining.remove(joined)
        self.servers.append(joined)
        self.tell("attach", joined.url)
        return True

    def turn_away(self, refused: Server, reason: str) -> None:
        """A joining server that is never tried again, unless it is dead; nothing where it was lost in between."""
        if refused in self.joining:
            (self._refuse if refused.healthy(HEALTH_S) else self.lose)(refused, reason)

    def lose(self, lost: Server, reason: str, alive: bool = False) -> None:
        """Forgets a server; starts it again, or looks whether it comes back, unless it was about to leave.

        Args:
            alive: it may still answer; it is of use again only after it has been away.
        """
        returns = lost not in self.leaving
        self._forget(lost, reason)
        how = f"{lost.name} {lost.end(reason)}"
        self.last = how + lost.end_of_log()
        if not returns:
            _say(how)
        elif lost.index is None:
            again = self._another(lost.origin, lost.url)
            self.registered = {key: again if each is lost else each for key, each in self.registered.items()}
            self._expect(again, away_first=alive)
            _say(f"{how}; if it comes back it will be {again.name}")
        elif self.restarts < self.config.rollout.max_restarts:
            self.restarts += 1
            again = server.start(self.config, lost.index, self._name(lost.origin))
            self._expect(again)
            limit = self.config.rollout.max_restarts
            _say(f"{how}; started again as {again.name}, restart {self.restarts} of rollout.max_restarts = {limit}")
        else:
            _say(f"{how}; rollout.max_restarts = {self.config.rollout.max_restarts} are used up")

    def find(self, url: str) -> Server | None:
        """The server that the client knows by this URL."""
        known = [*self.servers, *self.joining, *self.leaving]
        return next((each for each in known if each.url == url), None)

    def left(self, url: str) -> None:
        """A leaving server has answered everything."""
        gone = self.find(url)
        if gone in self.leaving:
            self.leaving.remove(gone)
            self.alone_since = time.monotonic()
            self.last = f"{gone.name} ({url}) has left"
            _say(self.last)

    def check(self, joinable: bool) -> None:
        """Raises RuntimeError where no server is left and none is coming, naming the one that was lost last.

        Args:
            joinable: whether a joining server will be attached.
        """
        if self.servers or self.leaving:
            return
        patient = time.monotonic() - self.alone_since <= self.config.rollout.startup_timeout_s
        if joinable and (self.joining or any(c.server.process is not None or patient for c in self.coming)):
            return
        raise RuntimeError(f"no server is left; the last one: {self.last}")

    def _all(self) -> list[Server]:
        return [*self.servers, *self.joining, *self.leaving, *(coming.server for coming in self.coming)]

    def _name(self, origin: str) -> str:
        """``origin``, or with the first number that makes it new."""
        name, number = origin, 0
        while name in self.names:
            number += 1
            name = f"{origin}.{number}"
        self.names.add(name)
        return name

    def _another(self, origin: str, url: str) -> Server:
        workers = self.config.rollout.tensor_model_parallel_size
        return Server(self._name(origin), url, workers, origin=origin)

    def _expect(self, expected: Server, away_first: bool = False) -> None:
        self.coming.append(_Coming(expected))
        arguments = (self.coming[-1], away_first, self.arrivals)
        threading.Thread(target=_wait_up, args=arguments, name=f"wait for {expected.name}", daemon=True).start()

    def _forget(self, gone: Server, reason: str) -> None:
        self.alone_since = time.monotonic()
        for group in (self.servers, self.joining, self.leaving):
            if gone in group:
                group.remove(gone)
                self.tell("detach", gone.url, reason)
        for coming in [c for c in self.coming if c.server is gone]:
            coming.dropped.set()
            self.coming.remove(coming)

    def _refuse(self, refused: Server, reason: str) -> None:
        self._forget(refused, reason)
        how = f"{refused.name} {refused.end(reason)}"
        self.last = how + refused.end_of_log()
        _say(f"{how}; it is not tried again")

    def _read_registry(self) -> None:
        asked = self.registry.look()
        for key in [key for key in self.registered if asked.get(key[0]) != key[1]]:
            self._leave(self.registered.pop(key))
        for name, url in asked.items():
            if (name, url) in self.registered:
                continue
            others = self._all()
            if double := [other.name for other in others if url == other.url]:
                self.registry.warn(name, f"{url} is {double[0]} already")
            elif name in [other.name for other in others]:
                self.registry.warn(name, "another server has this name")
            else:
                self.registered[name, url] = self._another(name, url)
                self._expect(self.registered[name, url])
                _say(f"{self.registered[name, url].name} ({url}) asks to join, and may as soon as it answers")

    def _leave(self, leaver: Server) -> None:
        if leaver in self.servers:
            self.servers.remove(leaver)
            self.leaving.append(leaver)
            self.tell("leave", leaver.url)
            _say(f"{leaver.name} ({leaver.url}) leaves")
        else:
            self._forget(leaver, "its registration was removed")


def _wait_up(coming: _Coming, away_first: bool, arrivals: queue.SimpleQueue[tuple[_Coming, str]]) -> None:
    """Waits until a server is healthy, checks its workers and its plugin, and says what is wrong with it."""
    each = coming.server
    period = OTHERS_PERIOD_S if each.process is None else PERIOD_S
    while not coming.dropped.is_set():
        healthy = each.healthy(HEALTH_S)
        if healthy and not away_first:
            try:
                server.check_workers(each)
                server.check_plugin(each)
            except RuntimeError as error:
                arrivals.put((coming, str(error)))
            except OSError:  # it has gone again
                healthy = False
            else:
                arrivals.put((coming, ""))
            if healthy:
                return
        away_first &= healthy
        coming.dropped.wait(period)


def _say(text: str) -> None:
    print(text, flush=True)
