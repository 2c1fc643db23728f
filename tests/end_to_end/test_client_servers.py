"""The client process when servers die, come back or are asked alone, and what it gives to a checkpoint."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_rlzero.generation.client import Client
from megatron_rlzero.generation.engine import BadServer
from megatron_rlzero.generation.sampler import Task
from megatron_rlzero.generation.schedule import Prompt
from megatron_rlzero.rollout import Rollout
from tests.fake_server import FakeServer, good, identity, retries
from tests.processes import wait_for
from tests.sampling import let_in, sampling


def test_a_death_in_mid_request_is_nobodys_attempt(attach) -> None:
    release = threading.Event()

    def hold(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(120.0)
        return good(body)

    engine, (dying, other), config = attach(hold, lambda n, body: good(body), max_retries=0, max_failed_fraction=0.0)
    engine.set_version(0)
    wait_for(lambda: dying.bodies, 120.0)
    asked = len(dying.bodies)
    dying.die()
    rollouts = engine.take(0)
    release.set()
    assert {(r.finish_reason, r.attempts) for r in rollouts} == {("stop", 1)}
    assert [s.name for s in engine.servers] == ["server-1"]
    identities = {identity(body) for body in dying.bodies}
    assert identities <= {identity(body) for body in other.bodies}
    lines = retries(config)
    assert len(lines) >= asked
    assert {(line["rerouted"], line["attempt"]) for line in lines} == {(True, 1)}
    assert re.search("connection failed|/health fails", lines[0]["reason"])


def test_the_deadline_waits_for_a_server(make_config) -> None:
    config, server = make_config(), FakeServer(lambda n, body: good(body))
    config.rollout.deadline_s = 6.0

    async def run() -> Rollout:
        async with sampling(config) as sampler:
            response = asyncio.create_task(sampler.respond(Task(0, Prompt(0, 0), 0), []))
            await asyncio.sleep(6.5)
            assert not response.done()
            let_in(sampler, server)
            return await response

    rollout = asyncio.run(run())
    assert (rollout.finish_reason, rollout.attempts, rollout.reward) == ("stop", 1, 1.0)


def test_time_at_a_server_that_died_does_not_count(make_config) -> None:
    release = threading.Event()

    def late(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(6.0)
        return good(body)

    dying, other = FakeServer(lambda n, body: (release.wait(60.0), good(body))[1]), FakeServer(late)
    config = make_config()
    config.rollout.deadline_s = 10.0

    async def run() -> Rollout:
        async with sampling(config) as sampler:
            let_in(sampler, dying)
            response = asyncio.create_task(sampler.respond(Task(0, Prompt(0, 0), 0), []))
            await asyncio.sleep(6.0)
            let_in(sampler, other)
            dying.die()
            return await response

    rollout = asyncio.run(run())
    release.set()
    assert (rollout.finish_reason, rollout.attempts, rollout.reward) == ("stop", 1, 1.0)
    assert rollout.info["end"] - rollout.info["start"] > 10.0


def test_requests_wait_for_a_server_that_is_let_in(attach) -> None:
    engine, (server,), _ = attach(lambda n, body: good(body), max_retries=0, max_failed_fraction=0.0)
    server.die()
    engine.set_version(0)
    returned, let_in = [], []
    wait_for(lambda: not engine.joining() and not engine.servers, 120.0)

    def admit() -> None:
        (joined,) = engine.joining()
        request = engine.begin_evaluation(False, 4, 1, 0, server=joined.name)
        assert len(engine.finish_evaluation(request)) == 4
        assert {body["request_id"].split("-")[0] for body in returned[0].bodies} == {"eval"}  # nobody else asks it
        let_in.append(joined.name)
        engine.attach(joined)

    threading.Timer(0.5, lambda: returned.append(FakeServer(port=server.server_port))).start()
    rollouts = engine.take(0, admit)
    assert let_in == ["server-0.1"]
    assert {(r.finish_reason, r.attempts) for r in rollouts} == {("stop", 1)}


def test_an_evaluation_of_one_server_says_what_is_wrong_with_it(attach) -> None:
    engine, (server, other), config = attach(lambda n, body: good(body), lambda n, body: good(body), max_retries=0)
    server.reply = lambda n, body: (500, {"error": "planted"})
    for fault, reply in (("HTTP 500", None), ("planted", lambda n, body: (400, {"error": "planted"}))):
        server.reply = reply or server.reply
        with pytest.raises(BadServer, match=fault):
            engine.finish_evaluation(engine.begin_evaluation(False, 2, 1, 0, server="server-0"))
    server.die()
    with pytest.raises(BadServer, match=r"connection failed|is gone|health"):
        engine.finish_evaluation(engine.begin_evaluation(False, 2, 1, 0, server="server-0"))
    with pytest.raises(BadServer, match="server-7 is gone"):
        engine.finish_evaluation(engine.begin_evaluation(False, 2, 1, 0, server="server-7"))
    assert len(engine.evaluate(False)) == config.eval.prompts
    assert len(other.bodies) == config.eval.prompts
    other.die()
    with pytest.raises(RuntimeError, match=r"no server is left; the last one: server-1 \(http.*fail"):
        engine.evaluate(False)


def test_rollouts_that_are_there_are_not_waited_for(attach, monkeypatch) -> None:
    release = threading.Event()

    def reply(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        if body["request_id"].startswith("train-1-"):  # update 1, which max_lag allows, must not be handed over first
            release.wait(120.0)
        return good(body)

    engine, _, config = attach(reply)
    engine.set_version(0)
    wait_for(engine.connection.poll, 120.0)

    def wait() -> None:
        raise TimeoutError

    monkeypatch.setattr(engine, "_receive", wait)
    assert len(engine.take(0, admit=lambda: None)) == config.loop.prompts_per_update
    with pytest.raises(TimeoutError):
        engine.take(2)  # which waits for version 1


def test_finished_responses_are_handed_back_and_not_asked_for_again(attach, make_config) -> None:
    release = threading.Event()

    def reply(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        if identity(body)[1][3] == 1:  # every second sample
            release.wait(120.0)
        return good(body)

    engine, (server,), config = attach(reply, samples_per_prompt=2)
    number = config.loop.prompts_per_update
    engine.set_version(0)
    wait_for(lambda: len(engine.finished(0)) >= 2 * number, 120.0)  # of updates 0 and 1, which max_lag allows
    partial = engine.finished(1)
    assert [(r.update, r.sample) for r in partial] == [(1, 0)] * number
    release.set()
    first = engine.take(0)
    wait_for(lambda: len(engine.finished(1)) >= 2 * number, 120.0)
    whole = engine.finished(1)
    known = [(r.update, r.item, r.sample, r.tokens.tolist()) for r in whole]
    found = [(r.update, r.item, r.sample, r.tokens.tolist()) for r in engine.finished(1)]
    assert found == known  # they stay here until somebody takes them
    assert [(r.item, r.sample) for r in whole] == [(r.item, r.sample) for r in engine.take(1)]
    assert engine.finished(0) == []
    engine.messages["update", 0] = first[1:]
    with pytest.raises(RuntimeError, match=rf"update 0: .* missing \[\({first[0].item}, 0\)\]"):
        engine.take(0)

    given = [*first, *partial]
    resumed, (server,), config = attach(reply, finished=given, samples_per_prompt=2)
    assert [(r.update, r.item, r.sample) for r in resumed.finished(0)] == [(r.update, r.item, r.sample) for r in given]
    resumed.set_version(0)
    assert [r.tokens.tolist() for r in resumed.take(0)] == [r.tokens.tolist() for r in first]
    assert [r.tokens.tolist() for r in resumed.take(1)] == [r.tokens.tolist() for r in whole]
    left = sorted((r.item, r.sample) for r in whole if r.sample == 1)
    assert sorted(identity(body)[1][2:] for body in server.bodies) == left
    with pytest.raises(ValueError, match=rf"update 1, item {first[0].item}, sample 0\), finished before, is not one"):
        Client(config, [replace(first[0], update=1)], None, None)
