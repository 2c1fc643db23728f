"""The long matrix: more models, the learner on up to eight ranks, engines of every kind on two."""

import pytest
import torch

from tests.parity.engine import Results
from tests.parity.runs import MIXED, PP2, TP2, TP2_EP2, differing, prompts, run, score, start
from tests.parity.test_engine import assert_layouts, assert_one_value

pytestmark = pytest.mark.full

MORE = ["dense_fp32", "qwen2tied_bf16", "llama_bf16", "smol_fp32", "ties_fp32", "wide_fp32"]
FULL = {
    4: {
        "tp4_ep4": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4},
        "tp4": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 1},
        "ep4": {"expert_model_parallel_size": 4},
        "tp2_ep2_pp2": TP2_EP2 | PP2,
        "tp2_ep4": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
    },
    8: {"tp4_ep4_pp2": {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4, **PP2}},
}


@pytest.fixture(scope="module")
def learner(models, every, tmp_path_factory):
    return score(models, every, tmp_path_factory.mktemp("learner"), {name: (name, {}) for name in MORE})


@pytest.mark.parametrize("name", MORE)
def test_more_models(every, learner, name):
    assert_one_value(every[name], tokens=100)
    assert differing(every[name].together, learner[name]) == 0


def test_more_models_on_two_ranks(models, every, tmp_path):
    cases = {
        "ties_tp2_ep2": ("ties_fp32", TP2_EP2),
        "dense_pp2": ("dense_fp32", PP2),
        "qwen2tied_pp2": ("qwen2tied_bf16", PP2),  # two layers and one
        "llama_tp2": ("llama_bf16", TP2),
    }
    assert_layouts(models, every, tmp_path, cases, 2)


@pytest.mark.parametrize("world", FULL)
def test_more_learner_layouts(models, every, tmp_path, world):
    names = ["moe_fp32", "moe_bf16", "ties_fp32", "ties_bf16", "wide_fp32", "wide_bf16"]
    cases = {
        f"{name}_{layout}": (name, settings)
        for layout, settings in FULL[world].items()
        for name in names
        if not (name.startswith("wide") and ("pipeline_model_parallel_size" in settings or "tp4" in layout))
    }
    dense = {k: v for k, v in FULL[world].items() if "ep" not in k}
    cases |= {f"{n}_{layout}": (n, s) for layout, s in dense.items() for n in ("dense_fp32", "tied_bf16")}
    assert_layouts(models, every, tmp_path, cases, world)


def test_more_engines_on_two_ranks(models, every, tmp_path):
    tp2 = {"tp": 2, **MIXED}
    edges = {"model": "ties", "length": 800, **tp2}
    runs = [
        run(models, "moe_fp32", "moe", "fp32", tp=2),
        run(models, "moe_bf16", "moe", "bf16", **tp2),
        run(models, "dense_fp32", "dense", "fp32", **tp2),
        *(few(run(models, name, *name.split("_"), **tp2), every) for name in ("tied_bf16", "qwen2_fp32")),
        few(run(models, "qwen2tied_bf16", "qwen2tied", "bf16", **tp2), every),  # both ranks hold the KV head
        few(run(models, "llama_bf16", "llama", "bf16", **tp2), every),
        few(run(models, "ties_bf16", dtype="bf16", **edges), every) | {"alone": [0, 5]},
        run(models, "wide_fp32", "wide", "fp32", **tp2) | {"prompts": prompts()[:8], "alone": [0, 7]},
    ]
    found = start(models, tmp_path, "aligned", runs, tp=2)
    for name, two in found.items():
        assert torch.equal(two.tokens, every[name].tokens), name
        assert differing(two.together, every[name].together) == differing(two.together, two.prefill) == 0, name


def few(run: dict, every: dict[str, Results]) -> dict:
    """The run with the prompts of the one of this name."""
    results = every[run["name"]]
    sequences = results.tokens.split(results.lengths.tolist())
    asked = [s[:p].tolist() for s, p in zip(sequences, results.prompts.tolist(), strict=True)]
    return run | {"prompts": asked, "alone": [0, 5, 12]}
