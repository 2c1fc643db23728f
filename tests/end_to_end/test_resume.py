"""A killed run goes on: a synchronous one equals the unbroken run to the bit, an asynchronous one loses nothing."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rlzero import checkpoint
from megatron_rlzero.generation.schedule import prompts_of_update
from megatron_rlzero.metrics import read_metrics
from megatron_rlzero.rollout_files import read_rollouts
from tests.end_to_end.test_train import command, start
from tests.processes import run, wait_for

TP2 = ("learner.world_size=2", "learner.tensor_model_parallel_size=2")
TIMES = ("seconds/", "tokens_per_second")


@pytest.fixture(scope="module")
def model(make_model, make_tokenizer, tmp_path_factory) -> Path:
    """It mostly says "1" or ends: a random model would never earn a reward, and learn nothing."""
    path = make_model(tmp_path_factory.mktemp("model"), seed=0)
    tokens = make_tokenizer(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 8.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0  # the first number of the residual stream stays what it is
    for token in ("1", "<|end|>"):
        tensors["lm_head.weight"][tokens[token], 0] = 1.6
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def configure(make_config, model: Path):
    config = make_config()
    config.run_dir += "/out"
    config.model.path = str(model)
    config.rollout.max_response_tokens = 4
    config.loop.prompts_per_update = 8  # which divides the 40 problems: no update has one twice
    config.learner.world_size = 1  # data parallelism would add gradients in another order than TP2
    config.learner.optimizer.lr_warmup_updates = 3
    config.checkpoint.resume = True
    for path in (config.environment.path, config.environment.eval_path):
        problems = [json.loads(line) | {"answer": 1} for line in Path(path).read_text().splitlines()]
        Path(path).write_text("\n".join(map(json.dumps, problems)))
    return config


def updates(run_dir: str) -> list[dict]:
    return [line for line in read_metrics(run_dir) if "reward/mean" in line]


def kill_at(config, update: int, *overrides: str) -> None:
    """kill -9 to the whole run as soon as it has written down ``update``."""
    process, output = start(config, *overrides)
    metrics = Path(config.run_dir, "metrics.jsonl")
    line = f'{{"update": {update}, "reward'
    try:
        wait_for(lambda: process.poll() is not None or (metrics.exists() and line in metrics.read_text()), 900)
        assert process.poll() is None, output.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)


def finish(config, *overrides: str) -> str:
    finished = run(command(config, *overrides), 1800.0)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def outcome(run_dir: str) -> tuple[list[dict], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Metrics but for the times, weights of the exported policy, and what the last checkpoint holds."""
    lines = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in read_metrics(run_dir)]
    state = load_file(checkpoint.whole(run_dir)[-1] / "learner" / "rank-00000.safetensors")
    return lines, load_file(Path(run_dir, "policy", "model.safetensors")), state


@pytest.mark.parametrize(
    ("length", "every", "kills"),
    [
        (5, 2, [(2, TP2)]),
        pytest.param(30, 5, [(7, ()), (13, TP2), (22, ())], marks=pytest.mark.full),
    ],
)
def test_a_synchronous_run_that_was_killed_equals_the_unbroken_one(make_config, model, length, every, kills):
    outcomes = []
    for broken in (False, True):
        config = configure(make_config, model)
        config.loop.updates, config.loop.max_lag, config.eval.every, config.checkpoint.every = length, 0, every, every
        config.loop.record_every = 1
        for update, layout in kills if broken else ():
            kill_at(config, update, *layout)
        finish(config)
        outcomes.append(outcome(config.run_dir))
    if len(kills) > 1:  # the short one has starts enough
        replay_equals_the_run(config)
    (lines, weights, state), (again, same, restored) = outcomes
    assert again == lines and len([line for line in lines if "reward/mean" in line]) == length
    assert weights.keys() == same.keys() and state.keys() == restored.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert all(torch.equal(state[name], restored[name]) for name in state)
    assert len({line["grad_norm"] for line in lines if "grad_norm" in line}) == length  # every step was one
    assert Path(config.run_dir, "abandoned.jsonl").stat().st_size > 0  # updates were done twice, and equal all the same


def replay_equals_the_run(config) -> None:
    """A batch that the run kept, trained on alone from the checkpoint before it."""
    state = checkpoint.whole(config.run_dir)[0]
    update = int(state.name[-8:])
    batch = f"{config.run_dir}/rollouts/update-{update:08d}.safetensors"
    replayed = f"{config.run_dir}-replayed"
    arguments = command(config, f"run_dir={replayed}", "--checkpoint", str(state), "--rollouts", batch)
    arguments[arguments.index("train")] = "replay"
    done = run(arguments, 1800.0)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,), original = read_metrics(replayed), updates(config.run_dir)[update]
    assert line == {name: original[name] for name in line} and line["grad_norm"] > 0


@pytest.mark.full
def test_an_asynchronous_run_goes_on_without_asking_twice(make_config, model):
    config = configure(make_config, model)
    config.loop.updates, config.loop.max_lag, config.checkpoint.every, config.loop.record_every = 9, 3, 2, 1
    kill_at(config, 5)
    saved = checkpoint.resume(config.run_dir)
    assert saved.version >= 4
    finish(config)
    assert [line["update"] for line in updates(config.run_dir)] == list(range(9))
    assert max(line["lag/max"] for line in updates(config.run_dir)) <= 3
    for update in range(9):
        rollouts = read_rollouts(Path(config.run_dir, "rollouts", f"update-{update:08d}.safetensors"))
        used = prompts_of_update(config.seed, 40, config.loop.prompts_per_update, update)
        assert sorted(r.item for r in rollouts) == sorted(prompt.item for prompt in used)
        assert all((r.versions[r.action_mask] >= update - 3).all() for r in rollouts)
        # What the checkpoint held was used as it was.
        kept = {(r.item, r.sample): r for r in saved.finished if r.update == update}
        assert all(
            kept[r.item, r.sample].tokens.tolist() == r.tokens.tolist() for r in rollouts if (r.item, r.sample) in kept
        )
