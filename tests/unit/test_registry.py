"""Files that ask to join a run: which are taken, and that the others are named once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_rlzero.config import Config
from megatron_rlzero.generation import registry
from megatron_rlzero.generation.registry import Registry, register
from megatron_rlzero.validation import ConfigError

URL = "http://127.0.0.1:8000"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(registry, "LOOK_S", 0.0)
    return Registry(Config(run_dir=str(tmp_path)))


def write(made: Registry, name: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (made.directory / name).write_text(text)


def test_files_come_change_and_go(made: Registry) -> None:
    assert made.look() == {}
    write(made, "node-1.json", {"url": f"{URL}/"})
    write(made, "node-1.json.part", {"url": URL})
    assert made.look() == {"node-1": URL}
    write(made, "node-1.json", {"url": "http://localhost:12345"})
    assert made.look() == {"node-1": "http://localhost:12345"}
    os.remove(made.directory / "node-1.json")
    assert made.look() == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "write"),
        ('{"url": "http', "write"),
        ("[]", "write"),
        ({"address": URL}, "write"),
        ({"url": 8000}, "write"),
        ({"url": "127.0.0.1:8000"}, "not the address of a server"),
        ({"url": "http://0.0.0.0:8000"}, "not the address of a server"),
        ({"url": "http://[::]:8000"}, "not the address of a server"),
        ({"url": "http://10.1.2.3:8000"}, "rollout.token_file is not set"),
    ],
)
def test_a_bad_file_is_named_once_until_it_changes(made: Registry, capsys, content: object, reason: str) -> None:
    write(made, "bad.json", content)
    write(made, "good.json", {"url": URL})
    for _ in range(3):
        assert made.look() == {"good": URL}
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{made.directory}/bad.json is ignored" in line
    assert reason in line
    write(made, "bad.json", {"url": "http://127.0.0.1:8001"})
    assert made.look() == {"good": URL, "bad": "http://127.0.0.1:8001"}


def test_servers_beyond_loopback_need_the_token_and_an_interface(made: Registry, capsys) -> None:
    write(made, "far.json", {"url": "http://10.1.2.3:8000"})
    made.config.rollout.token_file = "secret"
    assert made.look() == {}
    assert "refit.interface = lo" in capsys.readouterr().out
    made.config.refit.interface = "eth0"
    write(made, "far.json", {"url": "http://10.1.2.3:8000", "changed": True})
    assert made.look() == {"far": "http://10.1.2.3:8000"}


def test_the_directory_is_read_once_a_second(made: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOOK_S", 1000.0)
    assert made.look() == {}
    write(made, "node-1.json", {"url": URL})
    assert made.look() == {}


def test_a_server_registers_itself(made: Registry) -> None:
    path = register(made.config.run_dir, "node-1", "127.0.0.1", 8100)
    assert register(made.config.run_dir, "node-1", "127.0.0.1", 8100) == path  # started again
    assert made.look() == {"node-1": "http://127.0.0.1:8100"}
    for name, port in (("node-1", 8101), ("../other", 8100), (".hidden", 8100)):
        with pytest.raises(ConfigError, match=f"--join = {name}"):
            register(made.config.run_dir, name, "127.0.0.1", port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_asks_to_join_by_an_address_of_its_own(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host = .*: every address of this machine; give the one that the run"):
        register(str(tmp_path), "node-1", host, 8000)
    assert not (tmp_path / "servers").exists()
