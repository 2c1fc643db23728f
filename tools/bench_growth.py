"""How the time of an update grows with its tokens and with the parameters, and whether a long run grows at all.

Usage: python tools/bench_growth.py [--updates 2000] [--skip-run]. First the learner alone, one rank and one thread:
median seconds of a step at 1, 2, 4 and 8 times the responses, and at 1, 2, 4 and 8 times the layers; t = a + c n is
fitted, and what is printed is how far (t - a) / (c n) is from 1. Then a run on the whole stack, with the tiny model of
tiny_run.py: resident memory of every process and seconds per update, early and late, and the time that the queue's
own operations take at update 10 and at update 1,000,000.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tiny_run import PROMPTS, ROOT, TinyRun, text

TIMES = (1, 2, 4, 8)
RESPONSES, LENGTH, LAYERS, STEPS = 16, 64, 2, 5


def fit(name: str, sizes: list[float], seconds: list[float]) -> bool:
    """Prints t = a + c n and the largest deviation of (t - a) / (c n) from 1; whether it is within 0.2."""
    # Relative errors count: each time has about the same share of noise.
    weights = 1 / np.array(seconds)
    columns = np.stack((np.ones(len(sizes)), np.array(sizes)), 1)
    a, c = np.linalg.lstsq(columns * weights[:, None], np.array(seconds) * weights, rcond=None)[0]
    ratios = [(t - a) / (c * n) for n, t in zip(sizes, seconds, strict=True)]
    worst = max(abs(ratio - 1) for ratio in ratios)
    for n, t, ratio in zip(sizes, seconds, ratios, strict=True):
        print(f"{name} {n:>10,.0f}  {t * 1e3:8.1f} ms  without the fixed cost, of linear: {ratio:.2f}")
    print(f"{name}: fixed {a * 1e3:.1f} ms, {c * 1e9:.1f} ns each, largest deviation {worst:.2f} (limit 0.20)")
    return worst <= 0.2


def learner_alone(directory: Path) -> bool:
    """Runs as the one rank of a process group of its own."""
    import torch
    from megatron.core import parallel_state

    from megatron_rlzero.config import Config
    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.learner import Learner
    from megatron_rlzero.rollout import Rollout

    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from prepare import make_model, make_tokenizer

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    draw = np.random.default_rng(0)

    def batch(responses: int) -> Batch:
        action = np.arange(LENGTH) >= LENGTH // 4
        rollouts = [
            Rollout(
                0,
                i,
                0,
                draw.integers(0, 60, LENGTH).astype(np.int32),
                action,
                -4.0 * action.astype(np.float32),
                np.where(action, 0, -1).astype(np.int32),
                0.0,
                "stop",
            )
            for i in range(responses)
        ]
        return Batch.of(rollouts, draw.normal(size=responses))

    def seconds(layers: int, batches: list[Batch]) -> tuple[int, list[float]]:
        """Parameters that a layer's number multiplies, and the median step of each batch, taken in turns."""
        path = directory / f"{layers}-layers"
        hf = json.loads((ROOT / "examples/quickstart/qwen3_moe.json").read_text())
        hf |= {"num_hidden_layers": layers}
        make_model(path, hf, make_tokenizer(path), 1, seed=0)
        config = Config(run_dir=str(directory))
        config.model.path = str(path)
        config.learner.world_size = config.learner.expert_model_parallel_size = 1
        config.learner.max_tokens_per_microbatch = LENGTH * RESPONSES
        learner = Learner(config, device)
        count = sum(p.numel() for n, p in learner.parts.policy.named_parameters() if ".layers." in n)
        found: list[list[float]] = [[] for _ in batches]
        for turn in range(STEPS + 1):
            for i, each in enumerate(batches):
                start = time.perf_counter()
                learner.step(each)
                if turn:
                    found[i].append(time.perf_counter() - start)
        return count, [statistics.median(times) for times in found]

    made = Config(run_dir=str(directory))
    made.learner.world_size = made.learner.expert_model_parallel_size = 1
    device, _ = initialise_distributed(made)
    torch.set_num_threads(1)
    _, by_tokens = seconds(LAYERS, [batch(RESPONSES * n) for n in TIMES])
    holds = fit("tokens", [float(RESPONSES * LENGTH * n) for n in TIMES], by_tokens)
    counts, by_layers = zip(*(seconds(LAYERS * n, [batch(RESPONSES)]) for n in TIMES), strict=True)
    holds &= fit("parameters", [float(n) for n in counts], [t for (t,) in by_layers])
    parallel_state.destroy_model_parallel()
    return holds


def queue_operations() -> bool:
    """What the client does for an update besides asking: at update 10 and at update 1,000,000."""
    from megatron_rlzero.config import Config
    from megatron_rlzero.generation.schedule import check_complete, left_to_sample, responses_of_update
    from megatron_rlzero.rollout import Rollout

    config, medians = Config(run_dir="."), []
    for update in (10, 1_000_000):
        times = []
        for turn in range(20):
            start = time.perf_counter()
            wanted = responses_of_update(config, config.environment.size, update + turn)
            left_to_sample(config, update + turn, wanted, [])
            times.append(time.perf_counter() - start)
            nothing = np.zeros(0)
            check_complete(
                update + turn, wanted, [Rollout(0, p.item, s, *4 * [nothing], 0.0, "failed") for p, s in wanted]
            )
        medians.append(statistics.median(times))
    early, late = medians
    print(
        f"queue: {early * 1e6:.0f} us for an update at update 10, {late * 1e6:.0f} us at 1,000,000: {late / early:.2f}"
    )
    return late < 2 * early


def long_run(directory: Path, updates: int) -> bool:
    """Memory and speed of a run on the whole stack, a fifth of the way and at its end."""
    run = TinyRun(directory, "learner.world_size=1", "loop.max_lag=8", "checkpoint.every=100")
    run.start(updates)
    print(f"{updates} updates of {PROMPTS} prompts each, one rank, one server", flush=True)
    marks = [updates // 5, updates - updates // 20]
    found: list[dict[str, float]] = []
    try:
        for mark in marks:
            while run.updates() < mark and run.running():
                time.sleep(0.5)
            found.append({_kind(p): p.memory_full_info().uss / 2**20 for p in run.processes()})
        run.process.wait()
    finally:
        if run.running():
            os.killpg(run.process.pid, signal.SIGKILL)
    from megatron_rlzero.metrics import read_metrics

    holds = run.process.returncode == 0
    for kind in sorted(found[0].keys() & found[1].keys()):
        early, late = (each[kind] for each in found)
        holds &= late - early < max(0.05 * early, 10)
        print(f"memory of {kind:16} {early:7.0f} MiB at update {marks[0]}, {late:7.0f} MiB at {marks[1]}")
    seconds = [line["seconds/update"] for line in read_metrics(run.run_dir) if "seconds/update" in line]
    early, late = (statistics.median(seconds[mark - 100 : mark]) for mark in marks)
    print(f"median update: {early:.3f} s before update {marks[0]}, {late:.3f} s before {marks[1]}: {late / early:.2f}")
    return holds


def _kind(process) -> str:
    words = text(process)
    names = {"generation.client": "client", "vllm.entrypoints": "server", "spawn_main": "grader or engine"}
    found = next((name for word, name in names.items() if word in words), process.name())
    rank = process.environ().get("RANK")
    return f"rank {rank}" if rank and "train" in words else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--skip-run", action="store_true", help="the learner and the queue alone")
    parsed = parser.parse_args()
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, fp32, one thread a process")
    with tempfile.TemporaryDirectory() as directory:
        holds = queue_operations() & learner_alone(Path(directory))
        if not parsed.skip_run:
            holds &= long_run(Path(directory) / "long", parsed.updates)
    print("all within the limits" if holds else "NOT all within the limits")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
