"""A sampler as the client has it, in the test's own process: servers are let in by hand, every response is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megatron_rlzero.config import Config
from megatron_rlzero.generation.rotation import Rotation, session
from megatron_rlzero.generation.sampler import Sampler
from tests.fake_server import FakeServer


class Right:
    """Graders that find every response right."""

    async def grade(self, *_: Any) -> float:
        return 1.0


@asynccontextmanager
async def sampling(config: Config) -> AsyncIterator[Sampler]:
    """With no servers yet; those that are left at the end are let go."""
    sampler = Sampler(config)
    async with session() as connections, asyncio.TaskGroup() as tasks:
        sampler.rotation, sampler.graders = Rotation(connections, tasks, print, limit=100), Right()
        yield sampler
        for url in list(sampler.rotation.members):
            sampler.rotation.remove(url, "the test is over")


def let_in(sampler: Sampler, server: FakeServer) -> None:
    """Requests go to it from now on."""
    sampler.rotation.watch(server.url)
    sampler.rotation.open(server.url)
