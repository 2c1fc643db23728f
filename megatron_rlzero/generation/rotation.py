"""Which server the next request goes to, and which one is gone: the client's view of the servers.

A server is lost as soon as it refuses, resets or closes a connection without an answer, or fails its own /health.
What it was asked is then asked elsewhere. A long generation is no fault: requests have no read time-out. A server gets
no more requests than it can work at; the others wait here, where a server that joins or an evaluation finds them.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from megatron_rlzero.generation import http

#: seconds between two requests to a server's /health
PERIOD_S = 1.0
#: seconds without an answer, to /health or to a connection, after which a server is lost; one in a long step is slow
SILENCE_S = 30.0


class Lost(RuntimeError):
    """The server is gone or was taken away before it answered."""


@dataclass(eq=False)
class Member:
    """A server that is watched.

    Attributes:
        open: whether it is in rotation.
        reason: why it is no longer watched.
        load: requests that it was chosen for and that are not answered.
    """

    url: str
    open: bool = False
    leaving: bool = False
    reason: str = ""
    load: int = 0
    requests: set[asyncio.Timeout] = field(default_factory=set)


def session() -> aiohttp.ClientSession:
    """For all requests to servers: a connection each, since one that is kept and then closed looks like a loss."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    patience = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S)
    return aiohttp.ClientSession(connector=connector, timeout=patience, headers=http.HEADERS)


class Rotation:
    """The servers by URL, with a task each that asks for their health.

    Args:
        tell: gets ("lost", url, reason), once for each server that is lost, and ("left", url).
        limit: requests that a server gets at a time.
    """

    def __init__(
        self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, tell: Callable[[tuple], None], limit: int
    ) -> None:
        self.session, self.tasks, self.tell, self.limit = session, tasks, tell, limit
        self.members: dict[str, Member] = {}
        self.waiting: list[tuple[int, int, asyncio.Future[Member]]] = []  # a heap
        self.numbers = count()

    def watch(self, url: str) -> None:
        """Takes a server in that gets no requests but those that name it."""
        self.members[url] = Member(url)
        self.tasks.create_task(self._watch(self.members[url]))

    def open(self, url: str) -> None:
        """A watched server gets requests from now on; nothing where it was lost in between."""
        if url in self.members:
            self.members[url].open = True
            self._serve()

    def leave(self, url: str) -> None:
        """No new request goes to the server; it is forgotten when those in flight there are answered."""
        if (member := self.members.get(url)) is not None:
            member.open, member.leaving = False, True
            self._let_go(member)

    def remove(self, url: str, reason: str) -> None:
        """What is in flight at the server is asked elsewhere; nothing where it was lost before."""
        if (member := self.members.pop(url, None)) is not None:
            member.open, member.reason = False, reason
            for until in member.requests:
                until.reschedule(0.0)  # ends it now

    def _lose(self, member: Member, reason: str) -> None:
        if self.members.get(member.url) is member:
            self.remove(member.url, reason)
            self.tell(("lost", member.url, reason))

    def _let_go(self, member: Member) -> None:
        if member.leaving and not member.load and self.members.get(member.url) is member:
            self.remove(member.url, "it has left")
            self.tell(("left", member.url))

    async def choose(self, turn: int) -> Member:
        """The open server with the fewest requests, for one request that is then to be posted.

        Waits, for as long as it takes, until a server has fewer than ``limit``. Of those that wait the lowest ``turn``
        comes first, and of one turn who asked first.
        """
        chosen = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (turn, next(self.numbers), chosen))
        self._serve()
        return await chosen

    def name(self, url: str) -> Member:
        """This server, open or not, for one request that is then to be posted. Lost where it is gone."""
        if url not in self.members:
            raise Lost(f"{url} is gone")
        self.members[url].load += 1
        return self.members[url]

    def _serve(self) -> None:
        """Gives the places that are free to those that wait."""
        while self.waiting:
            free = [member for member in self.members.values() if member.open and member.load < self.limit]
            if not free:
                return
            *_, chosen = heapq.heappop(self.waiting)
            if not chosen.done():  # cancelled
                member = min(free, key=lambda member: member.load)
                member.load += 1
                chosen.set_result(member)

    async def post(self, member: Member, route: str, body: dict[str, Any]) -> tuple[int, str]:
        """HTTP status and text of the answer of a server that was chosen or named for this request.

        Raises:
            Lost: there is none, or it is an error of a server that is not healthy.
            OSError: this process may open no further connection.
            aiohttp.ClientError: the answer breaks HTTP.
        """
        try:
            if member.reason:  # lost since it was chosen
                raise Lost(member.reason)
            async with asyncio.timeout(None) as until:
                member.requests.add(until)
                try:
                    async with self.session.post(member.url + route, json=body) as response:
                        status, text = response.status, await response.text(errors="replace")
                finally:
                    member.requests.discard(until)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            _check_files(error)
            self._lose(member, f"connection failed: {error}")
            raise Lost(member.reason) from error
        except TimeoutError as error:
            raise Lost(member.reason) from error
        finally:
            member.load -= 1
            self._let_go(member)
            self._serve()
        if status >= 500 and (fault := await self._fault(member)):
            self._lose(member, fault)
            raise Lost(fault)
        return status, text

    async def _watch(self, member: Member) -> None:
        while not member.reason:
            await asyncio.sleep(PERIOD_S)
            if fault := await self._fault(member):
                self._lose(member, fault)
                return

    async def _fault(self, member: Member) -> str:
        """What is wrong with the server; empty where /health answers 200."""
        limit = aiohttp.ClientTimeout(total=SILENCE_S)
        try:
            async with self.session.get(f"{member.url}/health", timeout=limit) as response:
                return "" if response.status == 200 else f"/health answers HTTP {response.status}"
        except TimeoutError:
            return f"/health does not answer within {SILENCE_S:g} s"
        except aiohttp.ClientError as error:
            _check_files(error)
            return f"/health fails: {error}"


def _check_files(error: aiohttp.ClientError) -> None:
    """OSError where it is this process that may open no further connection: that is no server's fault."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        raise OSError(error.errno, f"{error}; raise the limit on open files (ulimit -n)") from error
