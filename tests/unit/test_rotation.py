"""The client's view of the servers: who gets a request, who is lost and when, who leaves."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Awaitable, Callable

import pytest

from megatron_rlzero.generation import rotation
from megatron_rlzero.generation.requests import ARGUMENT, ROUTE
from megatron_rlzero.generation.rotation import Lost, Rotation
from megatron_rlzero.generation.server import free_port
from tests.fake_server import CLOSE, FakeServer, good

BODY = {"token_ids": [5], "sampling_params": {"extra_args": {ARGUMENT: {"key": [1]}}}}


LIMIT = 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "PERIOD_S", 0.05)
    monkeypatch.setattr(rotation, "SILENCE_S", 30.0)


def run(steps: Callable[[Rotation, list], Awaitable[None]], *urls: str) -> list[tuple]:
    """What rank 0 is told while ``steps`` run on a rotation of these servers."""
    told: list[tuple] = []

    async def main() -> None:
        async with rotation.session() as session, asyncio.TaskGroup() as tasks:
            made = Rotation(session, tasks, told.append, LIMIT)
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


async def post(made: Rotation, turn: int = 0) -> tuple[int, str]:
    return await made.post(await made.choose(turn), ROUTE, BODY | {"turn": turn})


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


def test_no_more_requests_than_a_server_works_at_and_the_others_in_their_turn() -> None:
    """The others find a server that joins; one that is named does not wait."""
    release = threading.Event()
    busy, joined = (FakeServer(lambda n, body: (release.wait(60.0), good(body))[1]) for _ in range(2))

    async def steps(made: Rotation, told: list) -> None:
        first = [asyncio.create_task(post(made, 5)) for _ in range(LIMIT)]
        await until(lambda: len(busy.bodies) == LIMIT)
        later = [asyncio.create_task(post(made, turn)) for turn in (9, 7, 8, 7, -1, 9)]
        await asyncio.sleep(0.3)
        assert len(busy.bodies) == LIMIT
        named = asyncio.create_task(made.post(made.name(busy.url), ROUTE, BODY | {"turn": 5}))
        await until(lambda: len(busy.bodies) == LIMIT + 1)
        later[3].cancel()  # it has no part in the order any more
        made.watch(joined.url)
        made.open(joined.url)
        await until(lambda: len(joined.bodies) == LIMIT)
        assert sorted(body["turn"] for body in joined.bodies) == [-1, 7, 8, 9]
        release.set()
        results = await asyncio.gather(*first, named, *later, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 1
        assert {result[0] for result in results if not isinstance(result, BaseException)} == {200}
        assert {member.load for member in made.members.values()} == {0}

    assert run(steps, busy.url) == []


def test_a_server_that_was_lost_since_it_was_chosen_gets_nothing() -> None:
    server = FakeServer()

    async def steps(made: Rotation, told: list) -> None:
        chosen = await made.choose(0)
        made.remove(server.url, "it missed the weights")
        with pytest.raises(Lost, match="missed the weights"):
            await made.post(chosen, ROUTE, BODY)
        with pytest.raises(Lost, match="is gone"):
            made.name(server.url)
        assert server.bodies == []

    assert run(steps, server.url) == []


def test_too_many_open_files_are_no_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()

    async def steps(made: Rotation, told: list) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError, match="raise the limit on open files"):
                await post(made)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert list(made.members) == [server.url]

    monkeypatch.setattr(rotation, "PERIOD_S", 60.0)
    assert run(steps, server.url) == []


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


def test_silence_is_a_loss_and_a_long_generation_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "SILENCE_S", 4.0)
    release = threading.Event()
    hanging = FakeServer(lambda n, body: (release.wait(60.0), good(body))[1])
    hanging.health = lambda: (release.wait(60.0), 200)[1]
    busy = FakeServer(lambda n, body: (threading.Event().wait(9.0), good(body))[1])

    async def steps(made: Rotation, told: list) -> None:
        tasks = [asyncio.create_task(post(made)) for _ in range(2)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], Lost)
        assert results[1][0] == 200
        assert list(made.members) == [busy.url]

    told = run(steps, hanging.url, busy.url)
    release.set()
    assert told == [("lost", hanging.url, "/health does not answer within 4 s")]


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
