"""Which server the next request goes to, and which one is gone: the client's view of the servers.

A server is lost as soon as it refuses, resets or closes a connection without an answer, or fails its own /health.
What it was asked is then asked elsewhere. A long generation is no fault: requests have no read time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """A server that is watched; ``open`` is whether it is in rotation, ``reason`` why it is no longer watched."""

    url: str
    open: bool = False
    leaving: bool = False
    reason: str = ""
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
    """

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup, tell: Callable[[tuple], None]) -> None:
        self.session, self.tasks, self.tell = session, tasks, tell
        self.members: dict[str, Member] = {}
        self.opened = asyncio.Event()

    def watch(self, url: str) -> None:
        """Takes a server in that gets no requests but those that name it."""
        self.members[url] = Member(url)
        self.tasks.create_task(self._watch(self.members[url]))

    def open(self, url: str) -> None:
        """A watched server gets requests from now on; nothing where it was lost in between."""
        if url in self.members:
            self.members[url].open = True
            self.opened.set()

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
        if member.leaving and not member.requests and self.members.get(member.url) is member:
            self.remove(member.url, "it has left")
            self.tell(("left", member.url))

    async def choose(self) -> Member:
        """The open server with the fewest requests in flight; waits, for as long as it takes, until there is one."""
        while not (members := [member for member in self.members.values() if member.open]):
            self.opened.clear()
            await self.opened.wait()
        return min(members, key=lambda member: len(member.requests))

    async def post(self, member: Member, route: str, body: dict[str, Any]) -> tuple[int, str]:
        """HTTP status and text of the answer.

        Raises:
            Lost: there is none, or it is an error of a server that is not healthy.
            aiohttp.ClientError: the answer breaks HTTP.
        """
        try:
            async with asyncio.timeout(None) as until:
                member.requests.add(until)
                try:
                    async with self.session.post(member.url + route, json=body) as response:
                        status, text = response.status, await response.text(errors="replace")
                finally:
                    member.requests.discard(until)
                    self._let_go(member)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            self._lose(member, f"connection failed: {error}")
            raise Lost(member.reason) from error
        except TimeoutError as error:
            raise Lost(member.reason) from error
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
            return f"/health fails: {error}"
