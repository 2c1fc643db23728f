"""Who the servers are, on rank 0: started again after a death, given up, back again, joining and leaving by a file."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rlzero.config import Config
from megatron_rlzero.generation import members as module
from megatron_rlzero.generation import registry, server
from megatron_rlzero.generation.members import Members
from megatron_rlzero.generation.server import Server
from tests.fake_server import FakeServer, Handler

#: what a started server says before it dies
LAST_WORDS = "the engine is out of memory"


class World:
    """Members of a run, with fake servers: a child that sleeps stands for the process, a thread answers for it."""

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple] = []
        self.fakes: dict[str, FakeServer] = {}
        monkeypatch.setattr(registry, "LOOK_S", 0.0)
        monkeypatch.setattr(module, "PERIOD_S", 0.01)
        monkeypatch.setattr(module, "OTHERS_PERIOD_S", 0.02)
        monkeypatch.setattr(module, "HEALTH_S", 30.0)  # a dead one refuses at once
        monkeypatch.setattr(server, "END_S", 0.2)
        monkeypatch.setattr(server, "start", self.start)
        self.config = config
        self.members = Members(config, lambda *message: self.told.append(message))

    def start(self, config: Config, index: int, name: str) -> Server:
        log = Path(config.run_dir) / f"{name}.log"
        log.write_text(LAST_WORDS)
        process = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        self.fakes[name] = FakeServer()
        return Server(name, self.fakes[name].url, 1, process, log, index, f"server-{index}")

    def register(self, name: str, url: str) -> Path:
        path = Path(self.config.run_dir) / "servers" / f"{name}.json"
        path.write_text(json.dumps({"url": url}))
        return path

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < end
            self.members.look()
            time.sleep(0.01)

    def attach_all(self, count: int) -> list[Server]:
        self.until(lambda: len(self.members.joining) == count)
        for each in list(self.members.joining):
            self.members.attach(each)
        return list(self.members.servers)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    config = Config(run_dir=str(tmp_path))
    config.rollout.servers, config.rollout.max_restarts = 2, 1
    made = World(config, monkeypatch)
    yield made
    server.stop(made.members.processes())


def names(servers: list[Server]) -> list[str]:
    return sorted(each.name for each in servers)


def test_a_dead_server_is_started_again_and_then_given_up(world: World, capsys) -> None:
    members = world.members
    members.start()
    first, second = sorted(world.attach_all(2), key=lambda each: each.name)
    first.process.kill()
    world.until(lambda: members.joining)
    assert names(members.servers) == ["server-1"]
    (again,) = members.joining
    assert (again.name, again.index) == ("server-0.1", 0)
    assert again.process.pid != first.process.pid
    assert ("detach", first.url, "it ended") in world.told
    assert world.told[-1] == ("watch", again.url)
    members.check(joinable=False)  # the other one is left
    second.process.kill()
    world.until(lambda: not members.servers)
    members.check(joinable=True)
    pid = again.process.pid
    again.process.kill()
    world.until(lambda: not members.joining)
    with pytest.raises(RuntimeError, match=rf"server-0.1 \(pid {pid}\) was killed by SIGKILL.*\n{LAST_WORDS}"):
        members.check(joinable=True)
    output = capsys.readouterr().out
    assert "started again as server-0.1, restart 1 of rollout.max_restarts = 1" in output
    assert output.count("rollout.max_restarts = 1 are used up") == 2


def test_a_server_of_no_use_is_ended_with_its_process_group(world: World) -> None:
    world.config.rollout.max_restarts = 0
    members = world.members
    members.start()
    first, second = world.attach_all(2)
    members.lose(first, "it missed the weights", alive=True)
    assert first.process.poll() is not None
    end = time.monotonic() + 5.0
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:  # an orphan's new parent may take its time
            os.killpg(first.process.pid, 0)
    assert names(members.servers) == [second.name]
    members.lose(second, "silent")
    with pytest.raises(RuntimeError, match=rf"{second.name} \(pid \d+\): silent; the end of .*\n{LAST_WORDS}"):
        members.check(joinable=True)


def test_a_server_that_does_not_come_up_again_is_given_up(world: World) -> None:
    members = world.members
    members.start()
    first, second = world.attach_all(2)
    world.config.rollout.startup_timeout_s = 0.3
    start = world.start

    def sick(config: Config, index: int, name: str) -> Server:
        started = start(config, index, name)
        world.fakes[name].health = lambda: 503
        return started

    server.start = sick  # undone with the fixture's own
    first.process.kill()
    world.until(lambda: members.coming)
    world.until(lambda: not members.coming)
    assert "not ready after rollout.startup_timeout_s = 0.3" in members.last
    assert names(members.servers) == [second.name]


def test_a_url_that_comes_back_joins_again(world: World) -> None:
    fake = FakeServer()
    world.config.rollout.urls = [f"{fake.url}/"]
    members = world.members
    members.start()
    (first,) = world.attach_all(1)
    fake.die()
    members.lose(first, "refused")
    assert world.told[-1] == ("detach", first.url, "refused")
    members.check(joinable=True)
    with pytest.raises(RuntimeError, match=r"server-0 \(http.*\): refused"):
        members.check(joinable=False)
    FakeServer(port=fake.server_port)
    world.until(lambda: members.joining)
    assert names(members.joining) == ["server-0.1"]
    members.lose(members.joining[0], "it missed the weights", alive=True)  # of no use before it was away
    time.sleep(0.3)
    members.look()
    assert members.joining == []
    world.config.rollout.startup_timeout_s = 0.2
    with pytest.raises(RuntimeError, match=r"no server is left; the last one: server-0.1 .*missed the weights"):
        members.check(joinable=True)


def test_a_file_lets_a_server_join_and_leave(world: World, capsys) -> None:
    members = world.members
    members.start()
    world.attach_all(2)
    fake, other = FakeServer(), FakeServer()
    path = world.register("node-1", fake.url)
    world.until(lambda: members.joining)
    (joined,) = members.joining
    assert (joined.name, joined.url, joined.workers) == ("node-1", fake.url, 1)
    members.attach(joined)
    world.register("server-0", other.url)
    world.register("node-2", fake.url)
    for _ in range(3):
        members.look()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "server-0.json is ignored: another server has this name" in line]) == 1
    assert len([line for line in lines if f"node-2.json is ignored: {fake.url} is node-1 already" in line]) == 1
    path.unlink()
    members.look()
    assert world.told[-1] == ("leave", fake.url)
    assert names(members.servers) == ["server-0", "server-1"]
    assert members.leaving == [joined]
    members.left(fake.url)
    world.until(lambda: members.joining)  # the URL is free for the other file
    assert names(members.joining) == ["node-2"]
    assert members.leaving == []


def test_a_refused_server_is_not_tried_again_until_it_asks_anew(world: World) -> None:
    members = world.members
    fake = FakeServer()
    path = world.register("node-1", fake.url)
    world.until(lambda: members.joining)
    refused = members.joining[0]
    members.turn_away(refused, "a byte differs")
    members.turn_away(refused, "twice")
    for _ in range(10):
        members.look()
        time.sleep(0.01)
    assert members.joining == members.coming == []
    with pytest.raises(RuntimeError, match=r"no server is left; the last one: node-1 .*a byte differs"):
        members.check(joinable=True)
    path.unlink()
    members.look()
    world.register("node-1", fake.url)
    world.until(lambda: members.joining)
    assert names(members.joining) == ["node-1.1"]
    fake.die()
    members.turn_away(members.joining[0], "it does not answer")  # but was not refused
    FakeServer(port=fake.server_port)
    world.until(lambda: members.joining)
    assert names(members.joining) == ["node-1.2"]
    members.attach(refused)
    assert members.servers == []


def test_what_is_no_server_of_ours_is_refused(world: World, capsys) -> None:
    class Other(Handler):
        def do_POST(self) -> None:
            self._send(200, {})

    fake = FakeServer()
    fake.RequestHandlerClass = Other
    world.register("node-1", fake.url)
    world.until(lambda: "without our logits processor" in world.members.last)
    assert world.members.joining == []
    assert "it is not tried again" in capsys.readouterr().out
