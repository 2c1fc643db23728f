"""The client process against servers that misbehave on purpose: retries, failures, deadlines, lag, attaching."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.generation.engine import RolloutEngine
from megatron_rlzero.generation.grading import Graders
from megatron_rlzero.generation.requests import ARGUMENT
from megatron_rlzero.generation.sampler import Task
from megatron_rlzero.generation.schedule import Prompt
from megatron_rlzero.rollout import Rollout
from tests.fake_server import FakeServer, Handler, good, identity, retries
from tests.processes import command
from tests.sampling import let_in, sampling


def test_failed_responses_are_retried_with_their_key_then_recorded(attach) -> None:
    def reply(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        item = body["sampling_params"]["extra_args"][ARGUMENT]["key"][2]
        if item % 16 == 0:  # never
            return 500, {"error": "planted"}
        if item % 16 == 1 and n == 1:  # at the second attempt; without its finish_reason at the first
            answer = good(body)[1]
            answer["choices"][0]["finish_reason"] = None
            return 200, answer
        return good(body)

    engine, (server,), config = attach(reply, max_retries=1, max_failed_fraction=0.5)
    engine.set_version(0)
    rollouts = engine.take(0)
    assert len(rollouts) == config.loop.prompts_per_update
    for rollout in rollouts:
        prompt = rollout.tokens[: int((~rollout.action_mask).sum())].tolist()
        keys = {identity(b)[1] for b in server.bodies if b["token_ids"] == prompt}
        assert len(keys) == 1
        if rollout.item % 16 == 0:
            assert (rollout.finish_reason, rollout.attempts, rollout.action_tokens) == ("failed", 2, 0)
            assert rollout.reward == 0.0
            assert (rollout.versions == -1).all()
        else:
            assert (rollout.finish_reason, rollout.action_tokens) == ("stop", 3)
            assert rollout.attempts == (2 if rollout.item % 16 == 1 else 1)
            assert np.allclose(rollout.logprobs[rollout.action_mask], -0.5)
    lines = [line for line in retries(config) if line["update"] == 0]
    by_item = {r.item: len(r.tokens) - r.action_tokens for r in rollouts}
    attempts = {item: [line["attempt"] for line in lines if line["item"] == item] for item in by_item}
    assert attempts == {item: {0: [1, 2], 1: [1]}.get(item % 16, []) for item in by_item}
    for line in lines:
        assert "rerouted" not in line
        assert line["prompt_tokens"] == by_item[line["item"]]
        assert ("HTTP 500" if line["item"] % 16 == 0 else "finish_reason None") in line["reason"]


def test_too_many_failures_stop_the_run(attach) -> None:
    engine, _, config = attach(lambda n, body: (500, {"error": "planted"}), max_retries=0)
    engine.set_version(0)
    number = config.loop.prompts_per_update
    with pytest.raises(RuntimeError, match=rf"update \d: {number} of {number} responses failed.*HTTP 500.*planted"):
        engine.take(0)


def test_a_refused_request_stops_the_run_at_once(attach) -> None:
    engine, (server,), _ = attach(lambda n, body: (400, {"error": "prompt too long"}))
    engine.set_version(0)
    with pytest.raises(RuntimeError, match=r"HTTP 400.*prompt too long"):
        engine.take(0)
    assert max(len([b for b in server.bodies if identity(b) == identity(body)]) for body in server.bodies) == 1


def test_the_deadline_records_a_slow_response_as_failed(make_config) -> None:
    def reply(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        if body["sampling_params"]["extra_args"][ARGUMENT]["key"][2] == 1:
            time.sleep(60.0)
        return good(body)

    config, server = make_config(), FakeServer(reply)
    config.rollout.deadline_s = 8.0

    async def run() -> list[Rollout]:
        async with sampling(config) as sampler:
            let_in(sampler, server)
            return await asyncio.gather(*(sampler.respond(Task(0, Prompt(0, item), 0), []) for item in range(4)))

    rollouts = asyncio.run(run())
    assert [r.finish_reason for r in rollouts] == ["stop", "failed", "stop", "stop"]
    assert 8.0 <= rollouts[1].info["end"] - rollouts[1].info["start"] < 59.0


def test_prompts_start_when_the_version_allows_and_load_is_spread(attach) -> None:
    version = 0

    def reply(n: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(0.05)
        return good(body, version)

    engine, servers, config = attach(reply, reply)
    number = config.loop.prompts_per_update
    time.sleep(0.5)
    assert [len(server.bodies) for server in servers] == [0, 0]  # nothing before the first version
    engine.set_version(0)
    engine.take(0)
    engine.take(1)
    time.sleep(0.5)
    assert sum(len(server.bodies) for server in servers) == 2 * number  # max_lag is 1: update 2 waits
    assert min(len(server.bodies) for server in servers) >= number // 2
    version = 1
    engine.set_version(1)
    engine.take(2)
    engine.detach("server-0", "for this test")
    before = [len(server.bodies) for server in servers]
    version = 2
    engine.set_version(2)
    engine.take(3)
    assert len(servers[0].bodies) == before[0]
    assert len(servers[1].bodies) == before[1] + number
    items = Counter(identity(body)[1][2] for server in servers for body in server.bodies)
    assert sorted(items.values()) == [1] * 16 + [2] * 24  # 64 prompts of 40 items: an epoch and 24 of the next


def test_a_long_prompt_is_named(attach) -> None:
    engine, _, _ = attach(lambda n, body: good(body), max_prompt_tokens=5)
    engine.set_version(0)
    with pytest.raises(RuntimeError, match=r"train item \d+: rollout.max_prompt_tokens = 5.*raise it"):
        engine.take(0)


def test_a_server_without_our_sampling_is_refused(make_config) -> None:
    class Other(Handler):
        def do_POST(self) -> None:
            self._send(200, {})

    server = FakeServer(lambda n, body: good(body))
    server.RequestHandlerClass = Other
    config = make_config()
    config.rollout.urls = [server.url]
    engine = RolloutEngine(config)
    try:
        with pytest.raises(RuntimeError, match="without our logits processor"):
            engine.wait_ready()
    finally:
        engine.close()


def test_a_dead_grader_is_replaced_and_its_response_asked_for_again(attach) -> None:
    """A scorer that ends its process on a response: it fails, the others are graded, and the run goes on."""
    version = 0
    engine, _, config = attach(lambda n, body: good(body, version), max_retries=1, max_failed_fraction=0.5)
    number = config.loop.prompts_per_update
    client = psutil.Process(engine.client.pid)

    def graders() -> list[psutil.Process]:
        return [child for child in client.children(recursive=True) if "spawn_main" in command(child)]

    engine.set_version(0)
    assert {r.finish_reason for r in [*engine.take(0), *engine.take(1)]} == {"stop"}
    for grader in graders():
        grader.kill()
    version = 1
    engine.set_version(1)
    rollouts = engine.take(2)
    assert {r.finish_reason for r in rollouts} == {"stop"} and len(rollouts) == number
    assert {r.attempts for r in rollouts} == {1, 2}
    assert "the grading process ended" in {line["reason"] for line in retries(config)}.pop()


def test_a_hanging_grader_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")  # opening it blocks: nobody writes
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"problem": "1 + 1", "answer": 2}')
    config = EnvironmentConfig(kind="jsonl", path=str(problems), eval_path=str(tmp_path / "never"))

    async def run() -> None:
        graders = Graders(config)
        now = asyncio.get_running_loop().time
        assert await graders.grade("train", 0, "2", True, now() + 60.0) == 1.0
        workers = psutil.Process().children(recursive=True)
        for _ in range(3):  # more often than there are processes
            with pytest.raises(TimeoutError):
                await graders.grade("eval", 0, "2", True, now() + 3.0)
        assert await graders.grade("train", 0, "3", True, now() + 60.0) == 0.0
        assert any(not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE for worker in workers)
        while not graders.free.empty():
            graders.free.get_nowait().shutdown()

    asyncio.run(run())
