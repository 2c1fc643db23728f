"""The client's view of the servers: who gets a request, who is lost and when, who leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from megatron_rlzero.generation import rotation
from megatron_rlzero.generation.requests import ARGUMENT, ROUTE
from megatron_rlzero.generation.rotation import Lost, Rotation
from megatron_rlzero.generation.server import free_port
from tests.fake_server import CLOSE, FakeServer, good

BODY = {"token_ids": [5], "sampling_params": {"extra_args": {ARGUMENT: {"key": [1]}}}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "PERIOD_S", 0.05)
    monkeypatch.setattr(rotation, "SILENCE_S", 2.0)


def run(steps: Callable[[Rotation, list], Awaitable[None]], *urls: str) -> list[tuple]:
    """What rank 0 is told while ``steps`` run on a rotation of these servers."""
    told: list[tuple] = []

    async def main() -> None:
        async with rotation.session() as session, asyncio.TaskGroup() as tasks:
            made = Rotation(session, tasks, told.append)
            for url in urls:
                made.watch(url)
                made.open(url)
            await steps(made, told)
            for url in list(made.members):
                made.remove(url, "the test is over")

    asyncio.run(asyncio.wait_for(main(), 60.0))
    return told


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def post(made: Rotation) -> tuple[int, str]:
    return await made.post(await made.choose(), ROUTE, BODY)


def test_requests_go_where_the_fewest_are() -> None:
    release = threading.Event()

    def slow(n: int, body: dict) -> tuple:
        release.wait(60.0)
        return good(body)

    servers = [FakeServer(slow) for _ in range(3)]

    async def steps(made: Rotation, told: list) -> None:
        tasks = [asyncio.create_task(post(made)) for _ in range(7)]
        await until(lambda: sum(len(server.bodies) for server in servers) == 7)
        assert sorted(len(server.bodies) for server in servers) == [2, 2, 3]
        release.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}

    assert run(steps, *(server.url for server in servers)) == []


@pytest.mark.parametrize("how", ["refused", "closed", "cut off", "sick"])
def test_a_death_is_noticed_at_once_and_told_once(how: str) -> None:
    server = FakeServer(lambda n, body: CLOSE if how == "closed" else (500, {}))
    if how == "cut off":
        server.reply = lambda n, body: (threading.Event().wait(10.0), good(body))[1]
    if how == "sick":
        server.health = lambda: 503
    if how == "refused":
        server.die()

    async def steps(made: Rotation, told: list) -> None:
        tasks = [asyncio.create_task(post(made)) for _ in range(3)]
        if how == "cut off":
            await until(lambda: len(server.bodies) == 3)
            server.die()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Lost] * 3
        assert made.members == {}

    ((kind, url, reason),) = run(steps, server.url)
    assert (kind, url) == ("lost", server.url)
    assert ("HTTP 503" if how == "sick" else "connection failed") in reason or "/health fails" in reason


def test_an_error_of_a_healthy_server_is_an_answer() -> None:
    server = FakeServer(lambda n, body: (500, {"error": "planted"}))

    async def steps(made: Rotation, told: list) -> None:
        assert await post(made) == (500, '{"error": "planted"}')
        assert list(made.members) == [server.url]

    assert run(steps, server.url) == []


def test_an_idle_server_that_dies_is_noticed() -> None:
    server = FakeServer()

    async def steps(made: Rotation, told: list) -> None:
        await asyncio.sleep(0.2)
        assert told == []
        server.die()
        await until(lambda: told)

    ((kind, _, reason),) = run(steps, server.url)
    assert kind == "lost"
    assert "/health fails" in reason


def test_silence_is_a_loss_and_a_long_generation_is_not() -> None:
    release = threading.Event()
    hanging = FakeServer(lambda n, body: (release.wait(60.0), good(body))[1])
    hanging.health = lambda: (release.wait(60.0), 200)[1]
    busy = FakeServer(lambda n, body: (threading.Event().wait(5.0), good(body))[1])

    async def steps(made: Rotation, told: list) -> None:
        tasks = [asyncio.create_task(post(made)) for _ in range(2)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], Lost)
        assert results[1][0] == 200
        assert list(made.members) == [busy.url]

    told = run(steps, hanging.url, busy.url)
    release.set()
    assert told == [("lost", hanging.url, "/health does not answer within 2 s")]


def test_a_leaving_server_answers_and_gets_nothing_new() -> None:
    release = threading.Event()
    leaver, other = FakeServer(lambda n, body: (release.wait(60.0), good(body))[1]), FakeServer()

    async def steps(made: Rotation, told: list) -> None:
        task = asyncio.create_task(post(made))
        await until(lambda: leaver.bodies)
        made.leave(leaver.url)
        for _ in range(5):
            await post(made)
        assert (len(leaver.bodies), len(other.bodies)) == (1, 5)
        assert told == []
        release.set()
        assert (await task)[0] == 200
        assert told == [("left", leaver.url)]
        made.leave(other.url)  # nothing is in flight there
        assert told[1:] == [("left", other.url)]

    run(steps, leaver.url, other.url)


def test_requests_wait_for_a_server() -> None:
    server = FakeServer()

    async def steps(made: Rotation, told: list) -> None:
        task = asyncio.create_task(post(made))
        made.watch(server.url)
        await asyncio.sleep(0.2)
        assert not task.done()
        made.open(server.url)
        assert (await task)[0] == 200
        made.open(f"http://127.0.0.1:{free_port()}")  # lost before it was open
        assert list(made.members) == [server.url]

    run(steps)


def test_what_is_in_flight_at_a_removed_server_is_lost() -> None:
    server = FakeServer(lambda n, body: (threading.Event().wait(10.0), good(body))[1])

    async def steps(made: Rotation, told: list) -> None:
        task = asyncio.create_task(post(made))
        await until(lambda: server.bodies)
        made.remove(server.url, "it missed the weights")
        with pytest.raises(Lost, match="missed the weights"):
            await task
        made.remove(server.url, "twice")

    assert run(steps, server.url) == []
