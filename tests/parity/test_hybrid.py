"""Hybrids: the engine's log-probs of a token are one under every schedule, and they are the learner's.

Chunks of the prefill are cut by a budget of tokens that other requests share, so they end anywhere.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from tests.parity.engine import Results
from tests.parity.runs import PP2, TP2, TP2_EP2, differing, prompts, run, score, start, tokens
from tests.tiny import make_nemotron_h

CUT = {"chunk": 64}
TP2_PP2 = TP2 | PP2
EP2 = {"expert_model_parallel_size": 2}
NAMES = ["hybrid_fp32", "hybrid_bf16", "plain_fp32", "plain_bf16"]


def edges() -> list[list[int]]:
    """Around the ends of chunks of the scan, with a short document between long ones."""
    draw, c = random.Random(2), tiles.CHUNK
    return [tokens(draw, n) for n in (1, c - 1, c, c + 1, 3 * c + 5, 2, 2 * c - 16, 2 * c - 15, 3 * c + 5)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "hybrid": make_nemotron_h(root / "hybrid"),
        "other": make_nemotron_h(root / "other", seed=1),
        "plain": make_nemotron_h(root / "plain", pattern="M-*M", n_groups=2, time_step_min=1e-6),
    }


def with_edges(run: dict) -> dict:
    return run | {"prompts": prompts()[:24] + edges(), "alone": [0, 5, 24, 27, 28]}


@pytest.fixture(scope="module")
def aligned(models, tmp_path_factory) -> dict[str, Results]:
    runs = [
        *(with_edges(run(models, name, *name.split("_"), **CUT)) for name in NAMES),
        with_edges(run(models, "hybrid_fp32_whole", "hybrid", "fp32")),
        run(models, "hybrid_fp32_updated", "other", "fp32", **CUT) | {"update": str(models["hybrid"]), "alone": []},
    ]
    return start(models, tmp_path_factory.mktemp("aligned"), "aligned", runs)


@pytest.fixture(scope="module")
def stock(models, tmp_path_factory) -> dict[str, Results]:
    """vLLM's own has no experts in hybrids on CPUs."""
    runs = [with_edges(run(models, f"plain_{dtype}_stock", "plain", dtype, **CUT)) for dtype in ("fp32", "bf16")]
    return start(models, tmp_path_factory.mktemp("stock"), "stock", runs)


@pytest.fixture(scope="module")
def learner(models, aligned, stock, tmp_path_factory) -> dict[str, Tensor]:
    cases = {name: (name, {}) for name in (*NAMES, *stock)} | {
        "updated": ("hybrid_fp32_updated", {}),
        "other_microbatches": ("hybrid_bf16", {"max_tokens_per_microbatch": 260}),
        "other_slices": ("hybrid_fp32", {"reduction_slices": 2}),
    }
    return score(models, aligned | stock, tmp_path_factory.mktemp("learner"), cases)


@pytest.mark.parametrize("name", [*NAMES, "hybrid_fp32_whole"])
def test_together_alone_and_as_a_prefill(aligned, name):
    found = aligned[name]
    assert differing(found.together, found.prefill) == 0
    ran = ~found.alone.isnan()
    assert ran.any()
    assert differing(found.together[ran], found.alone[ran]) == 0
    assert torch.equal(found.responses()[ran], found.alone_tokens[ran])


def test_whole_prefills_and_chunks(aligned):
    whole, chunks = aligned["hybrid_fp32_whole"], aligned["hybrid_fp32"]
    assert torch.equal(whole.tokens, chunks.tokens)
    assert differing(whole.together, chunks.together) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_the_learner(aligned, learner, name):
    assert differing(aligned[name].together, learner[name]) == 0


def test_the_comparison_with_the_learner_can_fail(aligned, stock, learner):
    assert differing(learner["hybrid_bf16"], learner["other_microbatches"]) == 0
    assert differing(learner["hybrid_fp32"], learner["other_slices"]) > 100
    assert min(differing(stock[name].together, learner[name]) for name in stock) > 150
    # and vLLM's own kernels do not agree with themselves
    assert min(differing(found.together, found.prefill) for found in stock.values()) > 50


def test_an_update_in_flight(aligned, learner):
    """The states of the old weights are forgotten with the cache: what follows is of the new ones alone."""
    found = aligned["hybrid_fp32_updated"]
    after = torch.arange(16) >= found.switched[:, None]
    assert 0 < after.sum() < after.numel()
    new = (found.together.view(torch.int32) == learner["updated"].view(torch.int32)).view(after.shape)
    assert bool(new[after].all())
    assert not bool(new[~after].any())


@pytest.mark.parametrize(
    "names", [["hybrid_bf16"], pytest.param(["hybrid_fp32", "plain_fp32"], marks=pytest.mark.full)]
)
def test_the_engine_on_two_ranks(models, aligned, tmp_path, names):
    runs = [with_edges(run(models, name, *name.split("_"), tp=2, **CUT)) for name in names]
    for name, two in start(models, tmp_path, "aligned", runs, tp=2).items():
        assert torch.equal(two.tokens, aligned[name].tokens)
        assert differing(two.together, aligned[name].together) == differing(two.together, two.prefill) == 0


def test_learner_layouts(models, aligned, tmp_path):
    assert_layouts(models, aligned, tmp_path, {"tp2_ep2": TP2_EP2, "tp2": TP2, "ep2": EP2, "pp2": PP2}, 2)


@pytest.mark.full
def test_learner_layouts_on_four_ranks(models, aligned, tmp_path):
    layouts = {"tp2_ep2_pp2": TP2_EP2 | PP2, "tp2_pp2": TP2_PP2, "ep2_pp2": EP2 | PP2}
    assert_layouts(models, aligned, tmp_path, layouts, 4)


def assert_layouts(models, aligned, out: Path, layouts: dict[str, dict], world: int) -> None:
    cases = {
        f"{name}_{layout}": (name, settings)
        for layout, settings in layouts.items()
        for name in NAMES
        if "expert_model_parallel_size" not in settings or name.startswith("hybrid")
    }
    scored = score(models, aligned, out, cases, world)
    found = {case: differing(scored[case], aligned[name].together) for case, (name, _) in cases.items()}
    assert found == dict.fromkeys(cases, 0)
