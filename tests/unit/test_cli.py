"""The command line: exit codes, one line per violation on stderr, and what each command calls."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_rlzero import cli, launch, plot, summary
from megatron_rlzero.config import Config
from megatron_rlzero.validation import ConfigError

#: key -> value that is wrong by itself
FAULTS = {
    "model.dtype": "fp16",
    "learner.world_size": "0",
    "learner.context_parallel_size": "2",
    "learner.optimiser": "3",
    "learner.optimizer.lr": "fast",
    "rollout.temperature": "0",
    "loop.max_lag": "-1",
    "loop.advantage": "ppo",
    "eval.prompts": "0",
    "environment.kind": "text",
}


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """Not under a launcher."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def base(tmp_path):
    """A YAML file that is right but for what is planted."""
    model = tmp_path / "base"
    model.mkdir()
    hf = {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    hf |= {"vocab_size": 100, "hidden_size": 32, "rms_norm_eps": 1e-6, "moe_intermediate_size": 32}
    hf["num_experts_per_tok"] = 2
    (model / "config.json").write_text(json.dumps(hf | {"num_experts": 8, "max_position_embeddings": 256}))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}/run\nmodel: {{path: {model}}}\nenvironment: {{task: spell_backward}}\n")
    return str(path)


def planted(n=10):
    return [f"{key}={value}" for key, value in list(FAULTS.items())[:n]]


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("n", [1, 10])
def test_an_invalid_configuration_is_exit_code_2_with_a_line_each(base, capsys, command, n):
    assert cli.main([command, base, *planted(n)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == n
    assert {line.split(" = ")[0] for line in lines} == set(list(FAULTS)[:n])
    assert all("; " in line for line in lines)


def test_ten_faults_from_the_shell(base):
    """Nothing else is on stderr: no warning, no traceback."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rlzero", "train", base, *planted()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 10
    assert done.stdout == ""


def test_a_configuration_that_is_not_there_is_exit_code_2(tmp_path, capsys):
    assert cli.main(["train", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize("arguments", [[], ["learn"], ["train"], ["plot"]])
def test_usage_errors_are_argparse_s(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert "usage: megatron-rlzero" in capsys.readouterr().err


@pytest.fixture
def trained(monkeypatch, base):
    """``train`` with a launcher that only says how it ended; (run, what was called)."""
    calls = []
    config = Config(run_dir="somewhere")
    config.learner.world_size = 3
    monkeypatch.setattr("megatron_rlzero.validation.load", lambda path, overrides: config)
    monkeypatch.setattr(plot, "plot", lambda run_dir: calls.append(("plot", run_dir)))
    monkeypatch.setattr(summary, "summarise", lambda config, console: calls.append(("summary", config.run_dir)))

    def run(code):
        monkeypatch.setattr(launch, "launch", lambda arguments, size: calls.append((tuple(arguments), size)) or code)
        return cli.main(["train", base, "seed=3"])

    return run, calls, (("-m", "megatron_rlzero", "train", base, "seed=3"), 3)


def test_training_launches_the_ranks_then_plots_and_sums_up(trained):
    run, calls, launched = trained
    assert run(0) == 0
    assert calls == [launched, ("plot", "somewhere"), ("summary", "somewhere")]


@pytest.mark.parametrize("code", [1, 2, 137])
def test_the_exit_code_of_the_first_rank_that_failed_is_handed_on(trained, code):
    run, calls, launched = trained
    assert run(code) == code
    assert calls == [launched]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RuntimeError("server 0 died"), 1, "RuntimeError: server 0 died\n"),
        (FloatingPointError("loss = nan"), 1, "FloatingPointError: loss = nan\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ConfigError(["a = 1: x; y", "b = 2: x; y"]), 2, "a = 1: x; y\nb = 2: x; y\n"),
    ],
)
def test_errors_have_their_codes(monkeypatch, base, capsys, error, code, said):
    def fail(*_):
        raise error

    monkeypatch.setattr("megatron_rlzero.validation.load", fail)
    assert cli.main(["train", base]) == code
    assert capsys.readouterr().err == said


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch, base):
    def fail(*_):
        raise KeyError("oops")

    monkeypatch.setattr("megatron_rlzero.validation.load", fail)
    with pytest.raises(KeyError):
        cli.main(["train", base])


def write_run(directory, lines):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_plot_of_a_synthetic_run(tmp_path, capsys):
    lines = [{"update": 0, "eval/sampled": 0.25, "eval/greedy": 0.5}]
    for u in range(12):
        lines.append({"update": u, "reward/mean": u / 12, "rollout_kl/k3": 1e-3, "lag/mean": 1.0, "lag/max": 2.0})
    run_dir = write_run(tmp_path / "run", lines)
    assert cli.main(["plot", run_dir]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{run_dir}/plot.png\n", "")
    assert (tmp_path / "run" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_a_run_is_exit_code_1_with_a_line(tmp_path, capsys):
    assert cli.main(["plot", str(tmp_path / "absent")]) == 1
    assert f"{tmp_path}/absent/metrics.jsonl: no such file; give the run_dir of a run\n" in capsys.readouterr().err
    run_dir = write_run(tmp_path / "run", [{"update": 0, "eval/sampled": 0.25}])
    assert cli.main(["plot", run_dir]) == 1
    assert "records no update yet" in capsys.readouterr().err
    assert not (tmp_path / "run" / "plot.png").exists()


class FakeEngine:
    """Two of four held-out prompts are right when sampled, three when greedy."""

    made: list = []  # noqa: RUF012

    def __init__(self, config):
        self.config, self.calls = config, []
        self.made.append(self)

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))

    def evaluate(self, greedy):
        self.calls.append(("evaluate", greedy))
        if self.config.seed == 13:
            raise RuntimeError("server 0 died")
        return [type("R", (), {"reward": float(np.float32(i < (3 if greedy else 2)))}) for i in range(4)]


@pytest.fixture
def engine(monkeypatch):
    from megatron_rlzero.generation import engine as module

    FakeEngine.made.clear()
    monkeypatch.setattr(module, "RolloutEngine", FakeEngine)
    # The model is only a config.json.
    monkeypatch.setattr("megatron_rlzero.validation.validate", lambda config: [])
    return FakeEngine


def test_evaluate_prints_both_accuracies_and_ends_the_servers(engine, base, tmp_path, capsys):
    assert cli.main(["evaluate", base]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sampled pass@1 0.5000 over 4 prompts",
        "greedy pass@1 0.7500 over 4 prompts",
    ]
    (made,) = engine.made
    assert made.config.run_dir.startswith(f"{tmp_path}/run/evaluate-")
    assert made.calls[0] == ("wait_ready",)
    assert made.calls[-3:] == [("evaluate", False), ("evaluate", True), ("close",)]


def test_evaluate_ends_the_servers_after_an_error(engine, base, capsys):
    assert cli.main(["evaluate", base, "seed=13"]) == 1
    assert capsys.readouterr().err == "RuntimeError: server 0 died\n"
    assert engine.made[0].calls[-1] == ("close",)


def test_overrides_may_come_after_options(monkeypatch, base, capsys):
    """As in serve CONFIG --port 8100 a.b=c, which a launch script writes."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    cli.main(["serve", base, "seed=3", "--port", "8123", "rollout.temperature=0.5"])
    ((_, command, variables),) = started
    assert command[command.index("--port") + 1] == "8123"
    assert json.loads(variables["MEGATRON_RLZERO_SERVER"])["temperature"] == 0.5
    for arguments in (["serve", base, "--port", "1", "--part", "2"], ["plot", "run", "a.b=c"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2 and "unrecognized arguments" in capsys.readouterr().err


def test_a_server_that_others_can_reach_needs_a_secret(monkeypatch, base, capsys):
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started"))
    assert cli.main(["serve", base, "--host", "10.0.0.9"]) == 2
    assert "rollout.token_file" in capsys.readouterr().err
