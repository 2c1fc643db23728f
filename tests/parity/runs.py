"""What the parity tests run: small models, prompts, engines in a process of their own, the learner on its ranks."""

import json
import random
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rlzero.config import Config
from megatron_rlzero.generation import server
from megatron_rlzero.launch import launch
from tests.parity.engine import Results

LONG = 700
TP2_EP2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
#: Chunks of 64 tokens and a cache of prefixes: schedules of every kind.
MIXED = {"chunk": 64, "prefix_caching": True}

#: The heads of SmolLM2-135M: a contraction of 576 in slices of 144.
SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}


def differing(a: Tensor, b: Tensor) -> int:
    """Tokens whose fp32 log-prob differs in a byte."""
    assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def plant_ties(directory: Path) -> Path:
    """Router: experts 0, 1 and 6 score the same, so do 2, 4 and 7 with the opposite sign; 3 and 5 score 0.

    Ties at the boundary of the top two, decided for the lower ids: 3, 5, 6 and 7 get no token. Output layer: ten tokens
    have the same logits.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            one = tensor[0].clone()
            tensor[[1, 6]], tensor[[2, 4, 7]], tensor[[3, 5]] = one, -one, torch.zeros_like(one)
    tensors["lm_head.weight"][10:20] = tensors["lm_head.weight"][10]
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def without_head_dim(directory: Path) -> Path:
    """Leaves head_dim out of config.json, as older files do."""
    file = directory / "config.json"
    hf = json.loads(file.read_text())
    del hf["head_dim"]
    file.write_text(json.dumps(hf))
    return directory


def tokens(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(100) for _ in range(n)]


def prompts() -> list[list[int]]:
    """48: short ones of uneven lengths, and twelve with a block of the cache in common."""
    draw = random.Random(0)
    shared = tokens(draw, 150)
    short = [tokens(draw, draw.choice([1, 2, 7, 17, 33, 40])) for _ in range(36)]
    return short + [shared + tokens(draw, 5 + i) for i in range(12)]


def run(models, name: str, model: str, dtype: str, **engine) -> dict:
    settings = {"model": str(models[model]), "dtype": dtype, **engine}
    return {"name": name, "engine": settings, "prompts": prompts(), "new_tokens": 16, "alone": [0, 5, 40]}


def start(models, out: Path, kernels: str, runs: list[dict], tp: int = 1, **plan) -> dict[str, Results]:
    """All runs in one process."""
    config = Config(kernels=kernels)
    config.model.path = runs[0]["engine"]["model"]
    config.rollout.tensor_model_parallel_size = tp
    variables = server.environment(config) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    (out / "plan.json").write_text(json.dumps({"out": str(out), "runs": runs, **plan}))
    command = [sys.executable, "-m", "tests.parity.engine", str(out / "plan.json")]
    subprocess.run(command, env=variables, cwd=Path(__file__).parents[2], check=True, timeout=1800.0)
    return {run["name"]: Results.read(out / f"{run['name']}.safetensors") for run in runs}


def model_of(name: str) -> tuple[str, str]:
    """Model, of which the results ``name`` are, and dtype."""
    model, dtype = {"one_token": "ties_fp32"}.get(name, name).split("_")[:2]
    return model, dtype


def score(models, results: dict[str, Results], out: Path, cases: dict[str, tuple[str, dict]], world: int = 1) -> dict:
    """Case -> the learner's log-probs of the responses' tokens; a case is (name of results, settings)."""
    plan = []
    for case, (name, settings) in cases.items():
        model, dtype = model_of(name)
        save_file(vars(results[name]), out / f"{name}.results")
        files = {"model": str(models[model]), "results": str(out / f"{name}.results")}
        plan.append({"name": case, "dtype": dtype, "max_tokens_per_microbatch": 800, **files, **settings})
    (out / "cases.json").write_text(json.dumps({"out": str(out), "cases": plan}))
    assert launch(["-m", "tests.parity.score", str(out / "cases.json")], world) == 0
    return {case: load_file(out / f"{case}.safetensors")["log_pi"] for case in cases}
