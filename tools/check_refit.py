"""A refit puts every element where it belongs: parameters of a real server against the learner's, to the bit.

Usage: python tools/check_refit.py [TP EP PP RANKS]; 2 2 2 8 by default. Two servers, of one and of two workers.
The learner hands over its weights, takes an optimizer step and does so again, twice; after each time the servers'
workers hash every parameter, and rank 0 hashes what the engine's layout makes of the assembled weights. Between two
refits nothing but the plan is reused. Then 48 requests are sampled at temperature 0.8: together on each server, and
one by one on the first. Exit code 1 if a hash differs or is that of the version before, or if a sampled token or a byte
of its log-probability differs.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.config import Config
from megatron_rlzero.generation import http, requests, server
from megatron_rlzero.launch import launch

UPDATES = 3
#: workers of each server
ENGINES = (1, 2)
REQUESTS, TOKENS, TEMPERATURE = 48, 16, 0.8
HF = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


class Digests:
    """vLLM worker extension: hashes of this worker's parameters."""

    def parameter_digests(self) -> dict[str, str]:
        from megatron_rlzero.invariance.vllm_checks import parameters

        return {name: digest(tensor) for name, tensor in parameters(self.model_runner.model).items()}


def configuration(directory: Path, sizes: list[int], workers: int = 1) -> Config:
    config = Config(run_dir=str(directory / "run"))
    config.model.path = str(directory / "model")
    learner = config.learner
    learner.tensor_model_parallel_size, learner.expert_model_parallel_size = sizes[0], sizes[1]
    learner.pipeline_model_parallel_size, learner.world_size = sizes[2], sizes[3]
    config.rollout.tensor_model_parallel_size = workers
    config.rollout.max_num_seqs = 48
    config.rollout.temperature = TEMPERATURE
    config.rollout.engine_args = {
        "worker-extension-cls": "tools.check_refit.Digests",
        "skip-tokenizer-init": True,
        "distributed-executor-backend": "mp",
    }
    learner.optimizer.lr, learner.optimizer.lr_warmup_updates = 1e-2, 0
    return config


def expected(config: Config, weights: dict[str, Tensor], size: int, worker: int) -> dict[str, str]:
    """What the engine's layout makes of whole tensors."""
    from megatron_rlzero.architectures import architecture, read_config
    from megatron_rlzero.architectures.layouts import engine_layout
    from megatron_rlzero.architectures.rules import padded_vocab_size

    hf = read_config(config.model.path)
    pieces = engine_layout(architecture(hf), hf, size)[worker]
    shapes: dict[str, list[int]] = {}
    for piece in pieces:
        known = shapes.setdefault(piece.local, [0] * len(piece.local_box.stop))
        shapes[piece.local] = list(map(max, known, piece.local_box.stop))
    rows = padded_vocab_size(hf["vocab_size"], 1, 64) // size  # vLLM pads the vocabulary
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name][0] = rows
    made = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for piece in pieces:
        made[piece.local][piece.local_box.slices] = weights[piece.tensor][piece.box.slices]
    return {name: digest(tensor) for name, tensor in made.items()}


def rank_main(directory: Path, sizes: list[int], urls: list[str]) -> None:
    """One learner rank."""
    import numpy as np
    import torch.distributed as dist

    from megatron_rlzero.generation.refit import Refit
    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.learner import Learner
    from megatron_rlzero.rollout import Rollout

    config = configuration(directory, sizes)
    device, store = initialise_distributed(config)
    learner = Learner(config, device)
    weights = learner.weights
    servers = [(f"server of {n}", url, n) for n, url in zip(ENGINES, urls, strict=True)]
    refit = Refit(
        servers, dist.get_rank(), dist.get_world_size(), weights.layout, weights.engine_layout, weights.dtypes, store,
        "gloo", "lo", 120.0,
    )  # fmt: skip
    random = np.random.default_rng(0)
    responses = [
        Rollout(
            update=0,
            item=i,
            sample=0,
            tokens=random.integers(0, HF["vocab_size"], 24).astype(np.int32),
            action_mask=np.arange(24) >= 8,
            logprobs=np.full(24, -6.9, np.float32),
            versions=np.zeros(24, np.int32),
            reward=float(i % 2),
            finish_reason="stop",
        )
        for i in range(8)
    ]
    batch = Batch.of(responses, torch.linspace(-1, 1, 8))
    compared, differing = 0, 0
    before: dict[tuple[int, int, str], str] = {}
    for version in range(1, UPDATES + 1):
        refit.push(weights.local, version)
        whole = weights.assemble()
        for size, url in zip(ENGINES, urls, strict=True) if dist.get_rank() == 0 else ():
            answer = http.post(f"{url}/collective_rpc", {"method": "parameter_digests"}, 60.0)["results"]
            for worker, text in enumerate(answer):
                found = json.loads(text) if isinstance(text, str) else text
                for name, wanted in expected(config, whole, size, worker).items():
                    at = (size, worker, name)
                    compared += 1
                    if found.get(name) != wanted or before.get(at) == wanted:
                        differing += 1
                        print(
                            f"version {version}, server of {size}, worker {worker}: {name} is wrong or did not change"
                        )
                    before[at] = wanted
        learner.step(batch)
    if dist.get_rank() == 0:
        print(
            f"learner TP{sizes[0]} EP{sizes[1]} PP{sizes[2]} on {sizes[3]} ranks, servers TP{ENGINES}: "
            f"{UPDATES} refits, "
            f"{compared} parameters compared, {differing} differ",
            flush=True,
        )
        Path(directory, "result.json").write_text(json.dumps({"compared": compared, "differing": differing}))
    dist.destroy_process_group()


def sample(url: str, which: Sequence[int], seed: int = 1) -> list[tuple[list[int], bytes]]:
    """The responses to these requests, all at once: tokens, and the bytes of their log-probabilities."""

    def one(n: int) -> tuple[list[int], bytes]:
        prompt = [(7 * n + 3 * i) % HF["vocab_size"] for i in range(4 + n % 9)]
        body = requests.body(f"request-{n}", prompt, (seed, 0, n, 0), TEMPERATURE, TOKENS, ())
        answer = requests.parse(http.post(url + requests.ROUTE, body, 60.0), TOKENS, ())
        return answer.tokens.tolist(), answer.logprobs.tobytes()

    with ThreadPoolExecutor(len(which)) as threads:
        return list(threads.map(one, which))


def compare_samples(urls: Sequence[str]) -> int:
    """How many responses differ between servers, and between a server full and one request at a time."""
    together = [sample(url, range(REQUESTS)) for url in urls]
    alone = [sample(urls[0], [n])[0] for n in range(REQUESTS)]
    between = sum(a != b for a, b in zip(*together, strict=True))
    batch = sum(a != b for a, b in zip(together[0], alone, strict=True))
    other = sum(a == b for a, b in zip(together[0], sample(urls[0], range(REQUESTS), seed=2), strict=True))
    print(
        f"{REQUESTS} responses of {TOKENS} tokens: {between} differ between servers TP{ENGINES}, {batch} between "
        f"{REQUESTS} at once and one at a time, {REQUESTS - other} between two seeds",
        flush=True,
    )
    return between + batch + (other == REQUESTS)


def start(directory: Path, sizes: list[int], workers: int) -> server.Server:
    config, port, log = (
        configuration(directory, sizes, workers),
        server.free_port(),
        directory / f"server-{workers}.log",
    )
    variables = server.environment(config) | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = server.spawn(server.MODULE, server.flags(config, port), variables, log)
    return server.Server(f"server of {workers}", f"http://127.0.0.1:{port}", workers, process, log)


def main(sizes: list[int]) -> int:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**HF)).save_pretrained(directory / "model")
        started = [start(directory, sizes, workers) for workers in ENGINES]
        try:
            while not all(each.healthy(1.0) for each in started):
                for each in started:
                    each.check_alive()
                time.sleep(0.2)
            arguments = [__file__, "--rank", str(directory), json.dumps(sizes), *(each.url for each in started)]
            if launch(arguments, sizes[3]) != 0:
                print(*(server.tail(each.log) for each in started), sep="\n", file=sys.stderr)
                return 1
            result: dict[str, Any] = json.loads((directory / "result.json").read_text())
            result["differing"] += compare_samples([each.url for each in started])
        finally:
            server.stop([each.process for each in started])
    return 1 if result["differing"] or not result["compared"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main([int(a) for a in sys.argv[1:]] or [2, 2, 2, 8]))
