"""The rollout engine gives one token one log-prob, to the bit, in whatever company; and it is the learner's.

By transitivity: requests all at once = alone = as a prefill, whole, in chunks, with prefix caching and after an update
in flight; engine = learner; learner layouts = each other. Each with a control that differs.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rlzero.config import Config
from megatron_rlzero.generation import server
from megatron_rlzero.launch import launch
from tests.parity.engine import Results
from tests.tiny import make_qwen3, make_qwen3_moe

LONG = 700
TP2_EP2 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
#: Chunks of 64 tokens and a cache of prefixes: schedules of every kind.
MIXED = {"chunk": 64, "prefix_caching": True}


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


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "moe": make_qwen3_moe(root / "moe"),
        "other": make_qwen3_moe(root / "other", seed=1),
        "dense": make_qwen3(root / "dense"),
        "tied": make_qwen3(root / "tied", tie_word_embeddings=True),
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
    config.model.path = str(models["moe"])
    config.rollout.tensor_model_parallel_size = tp
    variables = server.environment(config) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    (out / "plan.json").write_text(json.dumps({"out": str(out), "runs": runs, **plan}))
    command = [sys.executable, "-m", "tests.parity.engine", str(out / "plan.json")]
    subprocess.run(command, env=variables, cwd=Path(__file__).parents[2], check=True)
    return {run["name"]: Results.read(out / f"{run['name']}.safetensors") for run in runs}


@pytest.fixture(scope="module")
def aligned_out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("aligned")


@pytest.fixture(scope="module")
def aligned(models, aligned_out) -> dict[str, Results]:
    draw = random.Random(1)
    edges = {"model": "ties", "length": 800, **MIXED}
    some = {"prompts": prompts()[:8], "alone": [0, 7]}
    runs = [
        run(models, "moe_fp32_whole", "moe", "fp32"),
        run(models, "moe_fp32", "moe", "fp32", **MIXED),
        run(models, "moe_fp32_updated", "other", "fp32", **MIXED) | {"update": str(models["moe"]), "alone": []},
        run(models, "moe_bf16", "moe", "bf16", **MIXED),
        run(models, "dense_fp32", "dense", "fp32", **MIXED),
        run(models, "tied_bf16", "tied", "bf16", **MIXED),
        run(models, "ties_fp32", dtype="fp32", **edges) | {"prompts": [*prompts()[:20], tokens(draw, LONG)]},
        run(models, "one_token", dtype="fp32", **edges) | {"prompts": [[7]], "new_tokens": 1, "alone": [0]},
        run(models, "ties_bf16", dtype="bf16", **edges) | {"prompts": [*prompts()[:20], tokens(draw, LONG)]},
        run(models, "wide_fp32", "wide", "fp32", **MIXED) | some,
        run(models, "wide_bf16", "wide", "bf16", **MIXED) | some,
    ]
    for each in runs:
        each["alone"] = [n for n in each["alone"] if n < len(each["prompts"])]
    return start(models, aligned_out, "aligned", runs, controls=str(models["moe"]))


@pytest.fixture(scope="module")
def stock(models, tmp_path_factory) -> dict[str, Results]:
    runs = [run(models, f"moe_{dtype}", "moe", dtype) for dtype in ("fp32", "bf16")]
    return start(models, tmp_path_factory.mktemp("stock"), "stock", runs)


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


NAMES = ["moe_fp32", "moe_bf16", "dense_fp32", "tied_bf16", "ties_fp32", "ties_bf16", "wide_fp32", "wide_bf16"]
NAMES += ["one_token", "moe_fp32_whole"]


@pytest.fixture(scope="module")
def learner(models, aligned, tmp_path_factory) -> dict[str, Tensor]:
    """The learner on one rank, scoring what the engine sampled."""
    cases = {name: (name, {}) for name in NAMES} | {
        "updated": ("moe_fp32_updated", {}),
        "other_microbatches": ("moe_bf16", {"max_tokens_per_microbatch": 260}),
        "other_slices": ("moe_fp32", {"reduction_slices": 2}),
        "other_slices_bf16": ("moe_bf16", {"reduction_slices": 2}),
    }
    return score(models, aligned, tmp_path_factory.mktemp("learner"), cases)


@pytest.mark.parametrize("name", NAMES)
def test_together_alone_and_as_a_prefill(aligned, name):
    found = aligned[name]
    assert differing(found.together, found.prefill) == 0
    ran = ~found.alone.isnan()
    assert ran.any()
    assert differing(found.together[ran], found.alone[ran]) == 0
    assert torch.equal(found.responses()[ran], found.alone_tokens[ran])
    assert differing(found.together[1:], found.together[:-1]) > len(found.together) // 2 or name == "one_token"


def test_whole_prefills_and_chunks_with_cached_prefixes(aligned):
    whole, chunks = aligned["moe_fp32_whole"], aligned["moe_fp32"]
    assert torch.equal(whole.tokens, chunks.tokens)
    assert differing(whole.together, chunks.together) == 0
    assert differing(whole.together, aligned["moe_bf16"].together) > 700


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_the_learner(aligned, learner, name):
    assert differing(aligned[name].together, learner[name]) == 0


def test_the_comparison_with_the_learner_can_fail(models, aligned, stock, learner, tmp_path):
    assert differing(learner["moe_bf16"], learner["other_microbatches"]) == 0
    assert differing(learner["moe_fp32"], learner["other_slices"]) > 100
    assert differing(learner["moe_bf16"], learner["other_slices_bf16"]) > 100
    scored = score(models, stock, tmp_path, {name: (name, {}) for name in stock})
    assert all(differing(stock[name].together, scored[name]) > 300 for name in stock)


def test_an_update_in_flight(aligned, learner):
    """Tokens sampled after it have the new weights' log-probs, those before it do not."""
    found = aligned["moe_fp32_updated"]
    after = torch.arange(16) >= found.switched[:, None]
    assert 0 < after.sum() < after.numel()
    new = (found.together.view(torch.int32) == learner["updated"].view(torch.int32)).view(after.shape)
    assert bool(new[after].all())
    assert not bool(new[~after].any())
    assert differing(found.prefill, learner["updated"]) == 0


def test_planted_edges_are_there(aligned, learner):
    assert int(aligned["ties_fp32"].prompts.max()) == LONG
    assert len(aligned["one_token"].together) == 1


@pytest.fixture(scope="module")
def parallel(models, tmp_path_factory) -> dict[str, Results]:
    runs = [run(models, "moe_bf16", "moe", "bf16", tp=2, **MIXED)]
    return start(models, tmp_path_factory.mktemp("parallel"), "aligned", runs, tp=2)


def test_the_engine_on_two_ranks(aligned, parallel):
    one, two = aligned["moe_bf16"], parallel["moe_bf16"]
    assert torch.equal(one.tokens, two.tokens)
    assert differing(one.together, two.together) == differing(one.together, two.prefill) == 0


def test_learner_layouts(models, aligned, learner, tmp_path):
    cases = {
        "tp2_ep2": ("moe_bf16", TP2_EP2),
        "ties_tp2_ep2": ("ties_fp32", TP2_EP2),
        "wide_tp2": ("wide_bf16", TP2_EP2),
        "tied_tp2": ("tied_bf16", TP2),
        "dense_pp2": ("dense_fp32", PP2),
        "one_token_tp2_ep2": ("one_token", TP2_EP2),
    }
    scored = score(models, aligned, tmp_path, cases, world=2)
    assert {
        case: differing(scored[case], aligned[name].together) for case, (name, _) in cases.items()
    } == dict.fromkeys(cases, 0)


def test_broken_hooks_are_named(aligned, aligned_out):
    found = json.loads((aligned_out / "controls.json").read_text())
    assert "model.layers.0.input_layernorm (RMSNorm)" in found.pop("a layer is not replaced")
    assert found.pop("a layer is passed by").endswith("2 layers were built and passed by: InvariantAttentionImpl")
    assert "k_norm.weight differs" in found.pop("a refit goes wrong")
    assert found.pop("nothing") == found.pop("a refit goes right") == ""
    assert len(found) == 2
    for name, error in found.items():
        assert f"the engine's parameter {name}" in error
