"""The command ``train`` on real parts: a run from start to export, and what is left when something kills it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from megatron_rlzero.config import Config
from megatron_rlzero.metrics import read_metrics
from tests.processes import command as process_command
from tests.processes import run, wait_for


def command(config: Config, *overrides: str) -> list[str]:
    path = Path(config.run_dir).parent / f"{Path(config.run_dir).name}.yaml"
    OmegaConf.save(OmegaConf.structured(config), path)
    return [sys.executable, "-m", "megatron_rlzero", "train", str(path), *overrides]


def start(config: Config, *overrides: str) -> tuple[subprocess.Popen, Path]:
    """A run in a session of its own, as a terminal would start it; its output goes to a file."""
    output = Path(f"{config.run_dir}.log")
    with output.open("wb") as file:
        arguments = command(config, *overrides)
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    return process, output


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_server(process: psutil.Process) -> bool:
    return "vllm.entrypoints" in process_command(process)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if runs(p)]


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
def config(make_config) -> Config:
    made = make_config()
    made.run_dir += "/out"
    made.rollout.max_response_tokens = 8
    made.learner.optimizer.lr_warmup_updates = 0
    made.learner.optimizer.weight_decay = 0.1  # a random model earns no reward: this is what moves its weights
    return made


def test_a_run_from_start_to_export(config):
    config.loop.updates, config.loop.max_lag = 6, 2
    config.probe.every = 2
    config.rollout.temperature = 0.8
    trained = run(command(config), 1800.0)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "mismatch at equal weights, tokens" in trained.stdout and f"{config.run_dir}/policy" in trained.stdout
    lines = read_metrics(config.run_dir)
    updates = [line for line in lines if "reward/mean" in line]
    assert [line["update"] for line in updates] == list(range(6))
    assert max(line["lag/max"] for line in updates) <= 2 < sum(line["lag/mean"] for line in updates)
    held_out = [line for line in lines if "eval/sampled" in line]
    assert all(line["eval/mismatch/differing_frac"] == 0 < line["eval/mismatch/tokens"] for line in held_out)
    policy = load_file(Path(config.run_dir, "policy", "model.safetensors"))
    base = load_file(Path(config.model.path, "model.safetensors"))
    assert policy.keys() == base.keys()
    assert any(not torch.equal(policy[name], base[name]) for name in base)
    for name in ("plot.png", "config.yaml", "best/config.json", "policy/tokenizer.json"):
        assert Path(config.run_dir, name).stat().st_size > 0


def listening(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def test_a_killed_server_ends_the_run(config):
    """While it runs, nothing of launcher, ranks and client listens beyond the loopback."""
    config.loop.updates, config.rollout.max_restarts = 100_000, 0
    process, output = start(config)
    try:
        metrics = Path(config.run_dir, "metrics.jsonl")
        wait_for(lambda: metrics.exists() and "reward/mean" in metrics.read_text(), 900)
        children = family(process)
        server = next(p for p in children if is_server(p))
        engines = {server, *server.children(recursive=True)}
        found = {p: listening(p) for p in [psutil.Process(process.pid), *children] if p not in engines}
        assert set().union(*found.values()) == {"127.0.0.1"}, found
        server.kill()
        assert process.wait(60) not in (0, None)
        text = output.read_text()
        assert f"server-0 (pid {server.pid}) was killed by SIGKILL" in text
        wait_for(lambda: not alive(children), 20)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_nothing_is_left_of_a_run_that_is_ended_from_outside(config, how):
    process, output = start(config)
    wait_for(lambda: any(is_server(p) for p in family(process)), 900)
    children = family(process)
    if how == "interrupt":  # Ctrl-C goes to every process of the terminal's foreground group
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    else:
        process.kill()
        process.wait(20)
    wait_for(lambda: not alive(children), 40)
    assert "Traceback" not in output.read_text()


@pytest.mark.full
def test_synchronous_runs_repeat_to_the_bit_also_under_another_layout(make_config):
    outcomes = []
    for layout in (
        ["world_size=1"],
        ["world_size=1"],
        ["world_size=2", "tensor_model_parallel_size=2"],
        ["other seed"],
    ):
        config = make_config()
        config.run_dir += "/out"
        config.rollout.max_response_tokens = 8
        config.loop.updates, config.loop.max_lag = 20, 0
        overrides = ["learner.world_size=1", "seed=2"] if layout == ["other seed"] else [f"learner.{o}" for o in layout]
        trained = run(command(config, *overrides), 600.0)
        assert trained.returncode == 0, trained.stdout + trained.stderr
        lines = [line for line in read_metrics(config.run_dir) if "reward/mean" in line]
        assert len(lines) == 20
        kept = ("loss", "reward/mean", "grad_norm", "entropy", "rollout_kl/k3", "lag/max", "mismatch/differing_frac")
        values = [{name: line[name] for name in kept} for line in lines]
        outcomes.append((values, load_file(Path(config.run_dir, "policy", "model.safetensors"))))
    (values, weights), *others, (different, _) = outcomes
    for again, same in others:
        assert again == values
        assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert different != values
