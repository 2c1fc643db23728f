"""A real vLLM server: sampling, in-flight refits, refused weights, the bound on lag, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.layouts import engine_layout
from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, requests
from megatron_rlzero.generation.engine import RolloutEngine
from megatron_rlzero.generation.refit import Refit
from megatron_rlzero.generation.requests import Answer
from megatron_rlzero.generation.server import free_port
from megatron_rlzero.resharding.layout import Box, Layout, Piece, whole_tensors
from tests.processes import survivors

LONG = 800
PROMPTS = [[2, 20 + n, 30 + n, 1, 3] for n in range(8)]
KEYS = [(1, 0, item, 0) for item in range(8)]

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def config(make_config) -> Config:
    config = make_config()
    config.rollout.max_response_tokens = LONG
    config.rollout.max_restarts = 0
    return config


@pytest.fixture(scope="module")
def engine(config: Config):
    """Ready, with the weights that the server loaded from the directory called version 0."""
    engine = RolloutEngine(config)
    try:
        engine.wait_ready()
        engine.label_weights(0)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def directories(model_directory: Path, make_model, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models; the first is the one that the server loaded."""
    return [model_directory, make_model(tmp_path_factory.mktemp("other"), seed=1)]


@pytest.fixture(scope="module")
def weights(directories: list[Path]) -> list[Weights]:
    return [load_file(path / "model.safetensors") for path in directories]


def make_refit(engine: RolloutEngine, weights: Weights, deadline_s: float = 30.0, **settings: int) -> Refit:
    """From one rank that holds ``weights``; ``settings`` differ from the model that the server has."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    servers = [(server.name, server.url, server.workers) for server in engine.servers]
    target = engine_layout_of(engine.config.model.path, **settings)
    dtypes = dict.fromkeys(shapes, torch.float32)
    return Refit(servers, 0, 1, {0: whole_tensors(shapes)}, target, dtypes, None, "gloo", "lo", deadline_s)


def engine_layout_of(directory: str | Path, **settings: int) -> Callable[[int], Layout]:
    hf = read_config(directory) | settings
    return partial(engine_layout, architecture(hf), hf)


@pytest.fixture(scope="module")
def refit(engine: RolloutEngine, weights: list[Weights]) -> Refit:
    return make_refit(engine, weights[0])


def generate(engine: RolloutEngine, tokens: int, which: list[int] | None = None, key: bool = True) -> list[Answer]:
    """The prompts' responses of exactly ``tokens`` tokens, all requests at once."""
    which = list(range(len(PROMPTS))) if which is None else which

    def one(n: int) -> Answer:
        body = requests.body(f"test-{n}", PROMPTS[n], KEYS[n] if key else None, 1.0, tokens, ())
        return requests.parse(http.post(engine.servers[0].url + requests.ROUTE, body, 600.0), tokens, ())

    with ThreadPoolExecutor(len(which)) as threads:
        return list(threads.map(one, which))


def reference(directory: Path, prompt: list[int], answer: Answer) -> np.ndarray:
    """transformers' log-probs of the response's tokens, float32 [n]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = torch.tensor([[*prompt, *answer.tokens.tolist()]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
    return logprobs[rows, tokens[0, len(prompt) :]].numpy()


def version(engine: RolloutEngine) -> str:
    return http.get(f"{engine.servers[0].url}/weight_info", 10.0)["weight_version"]


def test_sampling_parameters_exist_in_vllm() -> None:
    """vLLM ignores a misspelt one in silence."""
    source = Path(find_spec("vllm").origin).with_name("sampling_params.py").read_text(encoding="utf-8")
    names = requests.body("", [1], None, 1.0, 1, ())["sampling_params"]
    assert [name for name in names if f"\n    {name}: " not in source] == []
    assert "\n    temperatur: " not in source


def test_draw_depends_on_the_key_alone(engine: RolloutEngine) -> None:
    together = generate(engine, 40)
    alone = [generate(engine, 40, [n])[0] for n in (5, 2)]
    for n, answer in zip((5, 2), alone, strict=True):
        assert answer.tokens.tolist() == together[n].tokens.tolist()
    greedy = generate(engine, 40, key=False)
    assert all(g.logprobs.mean() > t.logprobs.mean() for g, t in zip(greedy, together, strict=True))
    assert all(g.tokens.tolist() != t.tokens.tolist() for g, t in zip(greedy, together, strict=True))


def test_refit_equals_a_fresh_server(
    engine: RolloutEngine, refit: Refit, weights: list[Weights], directories: list[Path]
) -> None:
    fresh = generate(engine, 40)
    stats = refit.push(weights[1], 1)
    assert stats.bytes == sum(tensor.numel() * 4 for tensor in weights[1].values())
    assert stats.detached == {}
    other = generate(engine, 40)
    for prompt, answer in zip(PROMPTS, other, strict=True):
        assert np.abs(answer.logprobs - reference(directories[1], prompt, answer)).max() < 1e-4
        assert np.abs(answer.logprobs - reference(directories[0], prompt, answer)).max() > 0.1
    refit.push(weights[0], 2)
    again = generate(engine, 40)
    for before, after, between in zip(fresh, again, other, strict=True):
        assert before.tokens.tolist() == after.tokens.tolist() != between.tokens.tolist()
        assert np.abs(before.logprobs - after.logprobs).max() <= 1e-5
        assert set(after.versions.tolist()) == {2}


def test_two_refits_in_flight(
    engine: RolloutEngine, refit: Refit, weights: list[Weights], directories: list[Path]
) -> None:
    first = int(version(engine))
    began = time.monotonic()
    generate(engine, 40)
    pause = time.monotonic() - began  # in which all responses have begun; LONG takes many of them
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(generate, engine, LONG)
        for step, tensors in enumerate((weights[1], weights[0]), first + 1):
            time.sleep(pause)
            assert not future.done(), "the responses ended before the weights changed; raise LONG"
            refit.push(tensors, step)
        answers = future.result(600.0)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert sorted(set(answer.versions.tolist())) == [first, first + 1, first + 2]
        assert (np.diff(answer.versions) >= 0).all()
        old, new = (reference(path, prompt, answer) for path in directories)
        by_version = np.where(answer.versions == first + 1, new, old)
        assert np.abs(answer.logprobs - by_version).max() < 1e-4
        assert np.abs(answer.logprobs - np.where(answer.versions == first + 1, old, new)).max() > 0.1


def test_bad_weights_leave_the_old_ones(engine: RolloutEngine, refit: Refit, weights: list[Weights]) -> None:
    before, number = generate(engine, 20), version(engine)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    poisoned = {**weights[1], name: weights[1][name].clone()}
    poisoned[name][3, 4] = torch.nan
    with pytest.raises(RuntimeError, match=r"refused the weights: 1 of .* of model.layers.1.mlp.experts.2.up_proj"):
        refit.push(poisoned, 1000)
    without = {key: tensor for key, tensor in weights[1].items() if key != name}
    with pytest.raises(ValueError, match=r"no source rank holds .*experts.2.up_proj"):
        make_refit(engine, without)
    with pytest.raises(RuntimeError, match=r"refused the weights: 16 tensors of worker 0 differ .*w13_weight.0"):
        make_refit(engine, weights[1], moe_intermediate_size=32)
    with pytest.raises(RuntimeError, match=r"refused the weights: 6 tensors of worker 0 differ .*experts.*\.3"):
        make_refit(engine, weights[1], num_experts=3)
    assert version(engine) == number
    for old, now in zip(before, generate(engine, 20), strict=True):
        assert old.tokens.tolist() == now.tokens.tolist()
        assert np.array_equal(old.logprobs, now.logprobs)
    repaired = make_refit(engine, weights[1])  # the server takes good weights after bad ones
    repaired.push(weights[1], int(number) + 1)
    assert version(engine) == str(int(number) + 1)


def test_a_server_that_joins_again_takes_the_place_of_what_was_there(
    engine: RolloutEngine, weights: list[Weights], directories: list[Path]
) -> None:
    """At the same address and under another name; an earlier run ended in the middle of its refit."""
    number, (server,) = int(version(engine)), engine.servers
    refit = make_refit(engine, weights[0])
    http.post(f"{server.url}/start_weight_update", None, 10.0)
    with pytest.raises(http.ServerError, match="already active"):
        http.post(f"{server.url}/start_weight_update", None, 10.0)
    assert refit.add([("again", server.url, server.workers)]) == {}
    stats = refit.push(weights[0], number + 1)
    assert stats.detached == {}
    assert stats.bytes == sum(tensor.numel() * 4 for tensor in weights[0].values())
    assert version(engine) == str(number + 1)
    for prompt, answer in zip(PROMPTS, generate(engine, 20), strict=True):
        assert np.abs(answer.logprobs - reference(directories[0], prompt, answer)).max() < 1e-4
    refit.keep([server.name])  # of which nothing is left
    assert refit.push(weights[1], number + 2).bytes == 0
    assert version(engine) == str(number + 1)


RANK_1 = """
import sys
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore
from megatron_rlzero.generation.refit import Refit
sys.path.insert(0, sys.argv[1])
from tests.end_to_end.test_server import engine_layout_of, halves, local_half
weights = load_file(sys.argv[2])
shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
store = TCPStore("127.0.0.1", int(sys.argv[3]), 2, False)
store.set("imported", "")  # which takes longer than rank 0 waits for it from there on
dtypes = dict.fromkeys(shapes, torch.float32)
refit = Refit([], 1, 2, halves(shapes), engine_layout_of(sys.argv[5]), dtypes, store, "gloo", "lo", 30.0)
refit.add([])
mine = local_half(weights, 1)
refit.push(mine, int(sys.argv[4]))
bad = {name: tensor.clone() for name, tensor in mine.items()}
bad["half of lm_head.weight"][-1, -1] = torch.inf
try:
    refit.push(bad, 1000)
except RuntimeError as error:
    print(error)
"""


def halves(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Two ranks: each has half the rows of a matrix, in a larger tensor of its own, and all of a vector."""
    layout: Layout = {0: [], 1: []}
    for name, shape in shapes.items():
        for rank in layout:
            start, stop = (0, shape[0]) if len(shape) == 1 else (rank * (shape[0] // 2), shape[0] // 2)
            stop = shape[0] if rank == 1 else stop
            box = Box((start, *(0,) * (len(shape) - 1)), (stop, *shape[1:]))
            local = Box((1, *(0,) * (len(shape) - 1)), (1 + stop - start, *shape[1:]))
            layout[rank].append(Piece(name, box, f"half of {name}", local))
    return layout


def local_half(weights: Weights, rank: int) -> Weights:
    """What rank ``rank`` of ``halves`` holds; the row before its own is poisoned."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    return {
        piece.local: torch.cat([weights[piece.tensor][:1] * torch.nan, weights[piece.tensor][piece.box.slices]])
        for piece in halves(shapes)[rank]
    }


def test_refit_from_two_ranks(
    engine: RolloutEngine, weights: list[Weights], directories: list[Path], tmp_path: Path
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights[0].items()}
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    servers = [(server.name, server.url, server.workers) for server in engine.servers]
    script = tmp_path / "rank_1.py"
    script.write_text(RANK_1)
    number = int(version(engine)) + 1
    file = directories[0] / "model.safetensors"
    arguments = [str(Path(__file__).parents[2]), str(file), str(store.port), str(number), str(directories[0])]
    other = subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)
    dtypes = dict.fromkeys(shapes, torch.float32)
    store.wait(["imported"], timedelta(seconds=600))
    refit = Refit([], 0, 2, halves(shapes), engine_layout_of(directories[0]), dtypes, store, "gloo", "lo", 30.0)
    gone = ("gone", f"http://127.0.0.1:{free_port()}", 1)
    faults = refit.add([gone, *servers])
    assert faults.keys() == {"gone"}
    assert "refused" in faults["gone"]
    stats = refit.push(local_half(weights[0], 0), number)
    assert stats.bytes == sum(tensor.numel() * 4 for tensor in weights[0].values())
    assert version(engine) == str(number)
    answers = generate(engine, 20)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert np.abs(answer.logprobs - reference(directories[0], prompt, answer)).max() < 1e-4
        assert np.abs(answer.logprobs - reference(directories[1], prompt, answer)).max() > 0.1
    with pytest.raises(RuntimeError, match=r"refused the weights: 1 of .* of lm_head.weight"):
        refit.push(local_half(weights[0], 0), 1000)
    output, _ = other.communicate(timeout=120.0)
    assert "refused the weights: 1 of" in output
    assert version(engine) == str(number)


@pytest.mark.full
def test_updates_evaluations_and_the_bound_on_lag(engine: RolloutEngine, config: Config) -> None:
    current = 0
    engine.label_weights(current)
    engine.set_version(current)
    seen = []
    for update in range(2):  # the second may start, because max_lag is 1
        rollouts = engine.take(update)
        assert [(r.item, r.sample) for r in rollouts] == sorted((r.item, r.sample) for r in rollouts)
        assert len(rollouts) == config.loop.prompts_per_update
        for rollout in rollouts:
            prompt = int((~rollout.action_mask).sum())
            assert rollout.finish_reason in ("stop", "length")
            assert (rollout.finish_reason == "stop") == (rollout.tokens[-1] == 1)
            assert set(rollout.versions[prompt:].tolist()) == {current}
            assert set(rollout.versions[:prompt].tolist()) == {-1}
            assert rollout.tokens[0] == 2
            assert rollout.tokens[prompt - 1] == 3
        seen += [rollout.item for rollout in rollouts]
    assert len(set(seen)) == len(seen)
    time.sleep(1.0)
    assert engine.joining() == []
    assert not engine.connection.poll()  # update 2 waits for version 1
    first, second, greedy = engine.evaluate(False), engine.evaluate(False), engine.evaluate(True)
    assert len(first) == config.eval.prompts
    assert [r.tokens.tolist() for r in first] == [r.tokens.tolist() for r in second]
    assert [r.tokens.tolist() for r in first] != [r.tokens.tolist() for r in greedy]
    engine.label_weights(1)
    engine.set_version(1)
    assert len(engine.take(2)) == config.loop.prompts_per_update


def test_a_killed_server_ends_the_wait(engine: RolloutEngine) -> None:
    (server,) = engine.servers
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children, "the engine core is a process of its own"
    os.kill(server.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"server-0 \(pid {server.process.pid}\) was killed by SIGKILL"):
        engine.take(4)
    assert time.monotonic() - start < 30.0
    assert survivors(children, 20.0) == []
    engine.close()
    engine.close()
