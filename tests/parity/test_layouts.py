"""The long matrix: the learner on up to eight ranks, engines of every kind on two."""

import pytest
import torch

from tests.parity.engine import Results
from tests.parity.runs import MIXED, PP2, TP2_EP2, differing, prompts, run, score, start

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


@pytest.mark.full
@pytest.mark.parametrize("world", FULL)
def test_more_learner_layouts(models, aligned, tmp_path, world):
    names = ["moe_fp32", "moe_bf16", "ties_fp32", "ties_bf16", "wide_fp32", "wide_bf16"]
    cases = {
        f"{name}_{layout}": (name, settings)
        for layout, settings in FULL[world].items()
        for name in names
        if not (name.startswith("wide") and ("pipeline_model_parallel_size" in settings or "tp4" in layout))
    }
    dense = {k: v for k, v in FULL[world].items() if "ep" not in k}
    cases |= {f"{n}_{layout}": (n, s) for layout, s in dense.items() for n in ("dense_fp32", "tied_bf16")}
    scored = score(models, aligned, tmp_path, cases, world)
    found = {case: differing(scored[case], aligned[name].together) for case, (name, _) in cases.items()}
    assert found == dict.fromkeys(cases, 0)


@pytest.mark.full
def test_more_engines_on_two_ranks(models, aligned, tmp_path):
    few = {"prompts": aligned_prompts(aligned["llama_bf16"]), "alone": [0, 5, 12]}
    edges = {"model": "ties", "length": 800, "tp": 2, **MIXED}
    runs = [
        run(models, "moe_fp32", "moe", "fp32", tp=2),
        run(models, "dense_fp32", "dense", "fp32", tp=2, **MIXED),
        run(models, "tied_bf16", "tied", "bf16", tp=2, **MIXED),
        run(models, "qwen2_fp32", "qwen2", "fp32", tp=2, **MIXED) | few,
        run(models, "qwen2tied_bf16", "qwen2tied", "bf16", tp=2, **MIXED) | few,  # both ranks hold the KV head
        run(models, "llama_bf16", "llama", "bf16", tp=2, **MIXED) | few,
        run(models, "ties_bf16", dtype="bf16", **edges) | {"prompts": aligned_prompts(aligned["ties_bf16"])},
        run(models, "wide_fp32", "wide", "fp32", tp=2, **MIXED) | {"prompts": prompts()[:8], "alone": [0, 7]},
    ]
    next(r for r in runs if r["name"] == "ties_bf16")["alone"] = [0, 5]
    found = start(models, tmp_path, "aligned", runs, tp=2)
    for name, two in found.items():
        assert torch.equal(two.tokens, aligned[name].tokens), name
        assert differing(two.together, aligned[name].together) == differing(two.together, two.prefill) == 0, name


def aligned_prompts(results: Results) -> list[list[int]]:
    """The prompts that gave these results."""
    sequences = results.tokens.split(results.lengths.tolist())
    return [s[:p].tolist() for s, p in zip(sequences, results.prompts.tolist(), strict=True)]
