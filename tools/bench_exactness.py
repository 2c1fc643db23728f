"""What exactness costs: learner step and generation, aligned against stock, side by side in one run; and peak memory.

Usage: python tools/bench_exactness.py [rounds]. Two random Qwen3-MoE models: tiny (4 layers, hidden 64, 8 experts,
20-token prompts) and small (4 layers, hidden 256, 16 experts, 400-token prompts). Every process computes on one thread.
Aligned and stock live in processes of their own, each with the environment it has in a run, and take turns; a ratio is
that of the medians. Peak memory is the largest resident size of a process, looked at every millisecond, above what
it had before.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

KERNELS = ("aligned", "stock")
MODELS = {
    "tiny": {"model": {"num_hidden_layers": 4, "num_experts": 8}, "prompt": 20, "response": 16, "sequences": 64},
    "small": {
        "model": {
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_experts": 16,
            "moe_intermediate_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
        },
        "prompt": 400,
        "response": 32,
        "sequences": 16,
    },
}


def configuration(model: str, kernels: str, directory: str):
    from megatron_rlzero.config import Config

    config = Config(run_dir=directory, kernels=kernels)
    config.model.path = f"{directory}/{model}"
    config.learner.world_size = config.learner.expert_model_parallel_size = 1
    config.learner.max_tokens_per_microbatch = 4096
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = MODELS[model]["prompt"], 64
    return config


def learner_worker(model: str, kernels: str, directory: str) -> None:
    """Answers each line of standard input with the seconds of one training step."""
    import numpy as np

    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.learner import Learner
    from megatron_rlzero.rollout import Rollout

    config, sizes = configuration(model, kernels, directory), MODELS[model]
    device, _ = initialise_distributed(config)
    learner, random = Learner(config, device), np.random.default_rng(0)
    rollouts = []
    for i in range(sizes["sequences"]):
        n = sizes["prompt"] + sizes["response"]
        action = np.arange(n) >= sizes["prompt"]
        log_mu = np.where(action, -4.0, 0).astype(np.float32)
        tokens = random.integers(4, 90, n).astype(np.int32)
        rollouts.append(Rollout(0, i, 0, tokens, action, log_mu, action.astype(np.int32) - 1, 1.0, "stop"))
    batch = Batch.of(rollouts, np.ones(len(rollouts)))
    learner.step(batch)
    for _ in sys.stdin:
        start = time.perf_counter()
        learner.step(batch)
        print("seconds", time.perf_counter() - start, flush=True)


def engine_worker(model: str, kernels: str, directory: str) -> None:
    """Answers each line of standard input with the seconds that all responses took."""
    import numpy as np
    from vllm import LLM, SamplingParams

    config, sizes = configuration(model, kernels, directory), MODELS[model]
    longest = sizes["prompt"] + sizes["response"]
    llm = LLM(
        config.model.path,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
        max_model_len=longest,
        max_num_seqs=64,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    random = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=sizes["response"], ignore_eos=True, logprobs=0, detokenize=False
    )

    def generate() -> float:
        prompts = [
            {"prompt_token_ids": random.integers(4, 90, sizes["prompt"]).tolist()} for _ in range(sizes["sequences"])
        ]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    generate()
    for _ in sys.stdin:
        print("seconds", generate(), flush=True)


def memory_worker(what: str, _: str, __: str) -> None:
    """Prints the bytes that a forward and backward pass took at its peak."""
    import torch

    from megatron_rlzero.kernels.attention import attention
    from megatron_rlzero.kernels.log_prob import log_prob

    torch.set_num_threads(1)
    if what.startswith("log_prob"):
        hidden = torch.randn(4096, 64, requires_grad=True)
        weight = torch.randn(151_936, 64, requires_grad=True)
        targets = torch.randint(0, 151_936, (4096,))
        weight.grad = torch.zeros_like(weight)
    else:
        q, k, v = (torch.randn(4096, heads, 64, requires_grad=True) for heads in (8, 4, 4))
    process, peak, done = psutil.Process(), 0, threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if what == "log_prob aligned":
        log_prob(hidden, weight, targets, 151_936)[0].sum().backward()
    elif what == "log_prob naive":
        (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    else:
        attention(q, k, v, [4096], 0.125).sum().backward()
    done.set()
    watcher.join()
    print("bytes", peak - before, flush=True)


class Worker:
    """One of this file's workers as a child process."""

    def __init__(self, kind: str, model: str, kernels: str, directory: str) -> None:
        from megatron_rlzero.generation import server

        variables = server.base_environment()
        if kind == "engine":
            variables = server.environment(configuration(model, kernels, directory))
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        elif kind == "learner":
            variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            variables |= {"MASTER_PORT": str(server.free_port()), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, kind, model, kernels, directory],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> float:
        for line in self.process.stdout:
            if line.startswith(("seconds ", "bytes ")):
                return float(line.split()[1])
        raise RuntimeError(f"a worker ended with exit code {self.process.wait()}: {' '.join(self.process.args)}")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    if len(sys.argv) > 2:
        {"learner": learner_worker, "engine": engine_worker, "memory": memory_worker}[sys.argv[1]](*sys.argv[2:])
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.tiny import make_qwen3_moe

    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, one thread per process, {rounds} rounds in turns")
    with tempfile.TemporaryDirectory() as directory:
        for model, sizes in MODELS.items():
            make_qwen3_moe(Path(directory, model), **sizes["model"])
            path = Path(directory, model, "config.json")
            experts = {"num_experts": sizes["model"]["num_experts"]}  # vLLM's name for what transformers writes
            path.write_text(json.dumps(json.loads(path.read_text()) | experts))
            for kind in ("learner", "engine"):
                workers = {kernels: Worker(kind, model, kernels, directory) for kernels in KERNELS}
                seconds: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
                for _ in range(rounds):
                    for kernels, worker in workers.items():
                        seconds[kernels].append(worker.ask())
                for worker in workers.values():
                    worker.close()
                aligned, stock = (statistics.median(seconds[kernels]) for kernels in KERNELS)
                tokens = sizes["sequences"] * (sizes["response"] + (sizes["prompt"] if kind == "learner" else 0))
                print(
                    f"{model:6} {'step' if kind == 'learner' else 'generation':10} aligned {aligned:7.3f} s "
                    f"({tokens / aligned:7.0f} tokens/s)  stock {stock:7.3f} s ({tokens / stock:7.0f} tokens/s)  "
                    f"aligned/stock {aligned / stock:.2f}",
                    flush=True,
                )
        peak = {}
        for what in ("log_prob aligned", "log_prob naive", "attention"):
            worker = Worker("memory", what, "", "")
            peak[what] = worker.read()
            worker.close()
    ours, naive = peak["log_prob aligned"], peak["log_prob naive"]
    print(
        f"peak of log-probs, 4,096 tokens x 151,936 ids: {ours / 2**20:.0f} MiB, naive {naive / 2**20:.0f} MiB, ",
        end="",
    )
    print(f"1/{naive / ours:.0f}; attention forward and backward, 4,096 tokens: {peak['attention'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
