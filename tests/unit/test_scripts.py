"""The launch scripts of the 30B examples parse, and a dry run prints every command that they would start."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen3_30b_a3b"


@pytest.mark.parametrize("script", sorted(EXAMPLE.parent.glob("*/*.sh")), ids=lambda path: path.parent.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def dry_run(config, example=EXAMPLE, **variables):
    command = [str(example / "submit.sh"), "--dry-run", str(config), "loop.updates=7"]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    output = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in output.splitlines()]


def test_a_dry_run_prints_every_command(tmp_path):
    token, config = tmp_path / "token", tmp_path / "a config.yaml"
    config.touch()
    sbatch, *servers, learner = dry_run(config, LEARNER_NODES=3, ROLLOUT_NODES=2, TOKEN_FILE=token, INTERFACE="ib0")
    assert not token.exists()
    assert sbatch[0] == "sbatch" and "--nodes=5" in sbatch
    assert len(servers) == 2 * 2
    urls = []
    for command in servers:
        assert command[0] == "srun" and command[command.index("serve") + 1] == str(config)
        host, port = (command[command.index(flag) + 1] for flag in ("--host", "--port"))
        assert f"--nodelist={host}" in command
        urls.append(f"http://{host}:{port}")
    assert len(set(urls)) == 4
    devices = [part for command in servers for part in command if part.startswith("CUDA_VISIBLE_DEVICES=")]
    assert devices == ["CUDA_VISIBLE_DEVICES=0,1,2,3", "CUDA_VISIBLE_DEVICES=4,5,6,7"] * 2
    assert f"rollout.urls=[{','.join(urls)}]" in learner
    assert {"--nnodes=3", "--nproc-per-node=8", "--nodelist=learner-0,learner-1,learner-2"} <= set(learner)
    for command in (*servers, learner):
        assert {f"rollout.token_file={token}", "refit.interface=ib0", "loop.updates=7"} <= set(command)


def test_the_hybrid_has_its_own_sizes():
    example = EXAMPLE.parent / "nemotron_omni"
    sbatch, *servers, learner = dry_run(example / "rl.yaml", example)
    assert "--nodes=6" in sbatch and len(servers) == 8 and "--nnodes=4" in learner


def test_without_a_configuration_it_says_how(tmp_path):
    run = subprocess.run([str(EXAMPLE / "submit.sh"), "--dry-run"], capture_output=True, text=True)
    assert run.returncode != 0 and "usage: submit.sh" in run.stderr


@pytest.mark.parametrize("variables, said", [({"LEARNER_NODES": "x"}, "LEARNER_NODES = x: give"), ({}, "no such file")])
def test_wrong_sizes_and_a_missing_file_are_named(variables, said):
    with pytest.raises(subprocess.CalledProcessError) as error:
        dry_run("nowhere.yaml", **variables)
    assert error.value.returncode == 2 and said in error.value.stderr
