"""Two nodes on one machine: torchrun twice and a server that was started apart, which asks for its secret."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, token
from megatron_rlzero.generation.server import free_port
from megatron_rlzero.metrics import read_metrics
from tests.processes import wait_for

SECRET = "c0ffee" * 8


@pytest.fixture
def config(make_config) -> Config:
    made = make_config()
    made.run_dir += "/out"
    made.learner.world_size = 2
    made.rollout.max_response_tokens = 8
    made.loop.updates, made.loop.max_lag, made.probe.every = 4, 1, 2
    made.learner.optimizer.lr_warmup_updates = 0
    made.learner.optimizer.weight_decay = 0.1
    secret = Path(made.run_dir).parent / "token"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    made.rollout.token_file = str(secret)
    return made


def run(arguments: list[str], log: Path) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", *arguments], stdout=output, stderr=subprocess.STDOUT)


def answer(url: str) -> bool:
    try:
        http.get(f"{url}/health", 1.0)
    except OSError:
        return False
    return True


def test_two_nodes_and_an_attached_server(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config.yaml"
    OmegaConf.save(OmegaConf.structured(config), path)
    port, rendezvous = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    server = run(["megatron_rlzero", "serve", str(path), "--port", str(port), "seed=1"], tmp_path / "server.log")
    nodes: list[subprocess.Popen] = []
    try:
        train = ["-m", "megatron_rlzero", "train", str(path), f"rollout.urls=[{url}]"]
        for node in range(2):  # both wait for the server
            place = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={rendezvous}"]
            arguments = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *place, *train]
            nodes.append(run(arguments, tmp_path / f"node-{node}.log"))
        monkeypatch.setattr(http, "HEADERS", token.header(SECRET))
        wait_for(lambda: answer(url), 900.0)
        for wrong in ({}, token.header("d" * 64)):
            monkeypatch.setattr(http, "HEADERS", wrong)
            for route in ("health", "weight_info", "pause", "inference/v1/generate"):
                with pytest.raises(http.ServerError, match="HTTP 401"):
                    (http.get if route in ("health", "weight_info") else lambda u, s: http.post(u, {}, s))(
                        f"{url}/{route}", 10.0
                    )
        codes = [node.wait(900.0) for node in nodes]
        assert codes == [0, 0], (tmp_path / "node-0.log").read_text()[-3000:]
        assert server.poll() is None  # it is not the run's to end
        updates = [line for line in read_metrics(config.run_dir) if "reward/mean" in line]
        assert [line["update"] for line in updates] == list(range(4))
        assert (Path(config.run_dir) / "policy" / "config.json").exists()
        assert SECRET not in "".join((tmp_path / f"node-{n}.log").read_text() for n in range(2))
    finally:
        started = [psutil.Process(p.pid) for p in (server, *nodes) if p.poll() is None]
        for process in [child for parent in started for child in (*parent.children(recursive=True), parent)]:
            process.kill()
        for process in (server, *nodes):
            process.wait(10.0)
