"""Two vLLM servers, one of which is killed in the middle of its work, started again and let in; tests in this order."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file

from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, requests
from megatron_rlzero.generation.engine import BadServer, RolloutEngine
from megatron_rlzero.generation.refit import Refit
from megatron_rlzero.generation.schedule import responses_of_update
from megatron_rlzero.generation.server import Server, free_port
from megatron_rlzero.rollout import Rollout
from tests.end_to_end.test_server import Weights, make_refit
from tests.processes import wait_for

LONG = 100


@pytest.fixture(scope="module")
def config(make_config) -> Config:
    made = make_config()
    made.rollout.servers, made.rollout.max_restarts, made.rollout.max_retries = 2, 1, 0
    made.rollout.max_response_tokens = LONG
    made.rollout.max_failed_fraction = 0.0
    return made


@pytest.fixture(scope="module")
def engine(config: Config) -> Iterator[RolloutEngine]:
    made = RolloutEngine(config)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def weights(config: Config) -> Weights:
    return load_file(Path(config.model.path) / "model.safetensors")


@pytest.fixture(scope="module")
def refit(engine: RolloutEngine, weights: Weights) -> Refit:
    return make_refit(engine, weights)


def again(engine: RolloutEngine, server: Server, rollouts: list[Rollout], seed: int) -> list[requests.Answer]:
    """What one server answers to the requests of an update's rollouts, asked directly."""
    wanted = responses_of_update(engine.config, engine.prompts, rollouts[0].update)
    epochs = {(prompt.item, sample): prompt.epoch for prompt, sample in wanted}

    def ask(rollout: Rollout) -> requests.Answer:
        key = seed, epochs[rollout.item, rollout.sample], rollout.item, rollout.sample
        prompt = rollout.tokens[~rollout.action_mask].tolist()
        body = requests.body(f"again-{rollout.item}", prompt, key, 1.0, LONG, {1})
        return requests.parse(http.post(server.url + requests.ROUTE, body, 600.0), LONG, {1})

    with ThreadPoolExecutor(len(rollouts)) as threads:
        return list(threads.map(ask, rollouts))


def asked(server: Server, client: psutil.Process) -> bool:
    """Whether the client has sent it requests: one at a time to a connection."""
    port = urlsplit(server.url).port
    return sum(bool(c.raddr) and c.raddr.port == port for c in client.net_connections("tcp")) > 1


def equal(rollouts: list[Rollout], answers: list[requests.Answer]) -> list[bool]:
    """Whether tokens and bytes of the log-probs are the same."""
    return [
        np.array_equal(r.tokens[r.action_mask], a.tokens)
        and r.logprobs[r.action_mask].tobytes() == a.logprobs.tobytes()
        for r, a in zip(rollouts, answers, strict=True)
    ]


def test_a_killed_server_costs_nothing(engine: RolloutEngine, refit: Refit, weights: Weights, config: Config) -> None:
    assert refit.push(weights, 0).detached == {}
    killed, left = engine.servers
    os.kill(killed.process.pid, signal.SIGSTOP)  # nothing is answered before it is killed
    engine.set_version(0)
    wait_for(lambda: asked(killed, psutil.Process(engine.client.pid)), 120.0)
    os.kill(killed.process.pid, signal.SIGCONT)
    time.sleep(0.05)
    os.kill(killed.process.pid, signal.SIGKILL)
    rollouts = engine.take(0)
    assert engine.servers == [left]
    lines = [json.loads(line) for line in (Path(config.run_dir) / "retries.jsonl").read_text().splitlines()]
    assert lines, "nothing was in flight when the server was killed"
    assert {(line["rerouted"], line["attempt"]) for line in lines} == {(True, 1)}
    assert {r.attempts for r in rollouts} == {1}
    assert all(equal(rollouts, again(engine, left, rollouts, config.seed)))
    assert not any(equal(rollouts, again(engine, left, rollouts, config.seed + 1)))
    assert refit.push(weights, 1).detached.keys() == {killed.name}
    engine.detach(killed.name, "is known to be lost")
    engine.set_version(1)
    assert {r.attempts for r in engine.take(1)} == {1}


@pytest.mark.full
def test_its_successor_is_let_in(engine: RolloutEngine, refit: Refit, weights: Weights, config: Config) -> None:
    (left,) = engine.servers

    def joining() -> list[Server]:
        engine.members.check(joinable=True)
        return engine.joining()

    (successor,) = wait_for(joining, 900.0)
    assert (successor.name, successor.log.name) == ("server-0.1", "server-0.1.log")
    with pytest.raises(BadServer, match=r"evaluation: 4 of 4 responses failed.*default"):  # weights of its own
        engine.finish_evaluation(engine.begin_evaluation(False, 4, 1, 0, server=successor.name))
    gone = ("gone", f"http://127.0.0.1:{free_port()}", 1)
    assert refit.add([(successor.name, successor.url, successor.workers), gone]).keys() == {"gone"}
    assert refit.push(weights, 1, only=[successor.name]).detached == {}
    answers = [
        engine.finish_evaluation(engine.begin_evaluation(False, 8, 1, 0, server=each.name))
        for each in (successor, left)
    ]
    assert [r.logprobs.tobytes() for r in answers[0]] == [r.logprobs.tobytes() for r in answers[1]]
    engine.attach(successor)
    engine.take(2)
    assert refit.push(weights, 2).detached == {}
    engine.set_version(2)
    rollouts = engine.take(3)
    assert all(equal(rollouts, again(engine, successor, rollouts, config.seed)))
