"""Models and what the engine makes of them, once for all parity tests."""

import random
from pathlib import Path

import pytest

from tests.parity.engine import Results
from tests.parity.runs import LONG, MIXED, SMOLLM2, plant_ties, prompts, run, start, tokens, without_head_dim
from tests.tiny import LLAMA3, make_llama, make_qwen2, make_qwen3, make_qwen3_moe

EDGES = {"model": "ties", "length": 800, **MIXED}
SOME = {"prompts": prompts()[:8], "alone": [0, 7]}
FEW = {"prompts": prompts()[:10] + prompts()[36:40], "alone": [0, 5, 12]}
LATE = {"prompts": [*prompts()[:20], tokens(random.Random(1), LONG)], "alone": [0, 5]}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "moe": make_qwen3_moe(root / "moe"),
        "other": make_qwen3_moe(root / "other", seed=1),
        "dense": make_qwen3(root / "dense"),
        "tied": make_qwen3(root / "tied", tie_word_embeddings=True),
        "qwen2": make_qwen2(root / "qwen2"),
        # one KV head
        "qwen2tied": make_qwen2(root / "qwen2tied", num_key_value_heads=1, tie_word_embeddings=True),
        "llama": make_llama(root / "llama", rope_parameters=LLAMA3),
        "smol": without_head_dim(make_llama(root / "smol", tie_word_embeddings=True, **SMOLLM2)),
        "ties": plant_ties(make_qwen3_moe(root / "ties", num_experts=8, max_position_embeddings=1024)),
        "wide": make_qwen3_moe(
            root / "wide",
            vocab_size=151_936,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            moe_intermediate_size=32,
        ),
    }


@pytest.fixture(scope="session")
def aligned_out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("aligned")


@pytest.fixture(scope="session")
def aligned(models, aligned_out) -> dict[str, Results]:
    runs = [
        run(models, "moe_fp32_whole", "moe", "fp32"),
        run(models, "moe_fp32", "moe", "fp32", **MIXED),
        run(models, "moe_fp32_updated", "other", "fp32", **MIXED) | {"update": str(models["moe"]), "alone": []},
        run(models, "moe_bf16", "moe", "bf16", **MIXED),
        run(models, "tied_bf16", "tied", "bf16", **MIXED) | FEW,
        run(models, "qwen2_fp32", "qwen2", "fp32", **MIXED) | FEW,
        run(models, "one_token", dtype="fp32", **EDGES) | {"prompts": [[7]], "new_tokens": 1, "alone": [0]},
        run(models, "ties_bf16", dtype="bf16", **EDGES) | LATE,
        run(models, "wide_bf16", "wide", "bf16", **MIXED) | SOME,
    ]
    return start(models, aligned_out, "aligned", runs, controls=str(models["moe"]))


@pytest.fixture(scope="session")
def every(models, aligned, tmp_path_factory) -> dict[str, Results]:
    """Those and more, for the long matrices."""
    runs = [
        run(models, "dense_fp32", "dense", "fp32", **MIXED),
        run(models, "qwen2tied_bf16", "qwen2tied", "bf16", **MIXED) | FEW,
        run(models, "llama_bf16", "llama", "bf16", **MIXED) | FEW,
        run(models, "smol_fp32", "smol", "fp32", **MIXED) | FEW,
        run(models, "ties_fp32", dtype="fp32", **EDGES) | LATE,
        run(models, "wide_fp32", "wide", "fp32", **MIXED) | SOME,
    ]
    return aligned | start(models, tmp_path_factory.mktemp("every"), "aligned", runs)
