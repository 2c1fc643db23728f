"""The rollout engine gives one token one log-prob, to the bit, in whatever company; and it is the learner's.

By transitivity: requests all at once = alone = as a prefill, whole, in chunks, with prefix caching and after an update
in flight; engine = learner; learner layouts = each other. Each with a control that differs.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.engine import Results
from tests.parity.runs import LONG, PP2, TP2, TP2_EP2, differing, run, score, start

NAMES = ["moe_fp32", "moe_bf16", "moe_fp32_whole", "tied_bf16", "qwen2_fp32", "ties_bf16", "wide_bf16", "one_token"]


@pytest.fixture(scope="module")
def stock(models, tmp_path_factory) -> dict[str, Results]:
    runs = [run(models, f"moe_{dtype}_stock", "moe", dtype) for dtype in ("fp32", "bf16")]
    return start(models, tmp_path_factory.mktemp("stock"), "stock", runs)


@pytest.fixture(scope="module")
def learner(models, aligned, stock, tmp_path_factory) -> dict[str, Tensor]:
    """The learner on one rank, scoring what the engines sampled."""
    cases = {name: (name, {}) for name in (*NAMES, *stock)} | {
        "updated": ("moe_fp32_updated", {}),
        "other_microbatches": ("moe_bf16", {"max_tokens_per_microbatch": 260}),
        "other_slices": ("moe_fp32", {"reduction_slices": 2}),
        "other_slices_bf16": ("moe_bf16", {"reduction_slices": 2}),
    }
    return score(models, aligned | stock, tmp_path_factory.mktemp("learner"), cases)


@pytest.mark.parametrize("name", NAMES)
def test_together_alone_and_as_a_prefill(aligned, name):
    assert_one_value(aligned[name], tokens=1 if name == "one_token" else 100)


def assert_one_value(found: Results, tokens: int) -> None:
    assert differing(found.together, found.prefill) == 0
    ran = ~found.alone.isnan()
    assert ran.any()
    assert differing(found.together[ran], found.alone[ran]) == 0
    assert torch.equal(found.responses()[ran], found.alone_tokens[ran])
    assert len(found.together) >= tokens
    assert differing(found.together[1:], found.together[:-1]) > len(found.together) // 2 or tokens == 1


def test_whole_prefills_and_chunks_with_cached_prefixes(aligned):
    whole, chunks = aligned["moe_fp32_whole"], aligned["moe_fp32"]
    assert torch.equal(whole.tokens, chunks.tokens)
    assert differing(whole.together, chunks.together) == 0
    assert differing(whole.together, aligned["moe_bf16"].together) > 700


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_the_learner(aligned, learner, name):
    assert differing(aligned[name].together, learner[name]) == 0


def test_the_comparison_with_the_learner_can_fail(stock, learner):
    assert differing(learner["moe_bf16"], learner["other_microbatches"]) == 0
    assert differing(learner["moe_fp32"], learner["other_slices"]) > 100
    assert differing(learner["moe_bf16"], learner["other_slices_bf16"]) > 100
    assert all(differing(stock[name].together, learner[name]) > 300 for name in stock)


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
    assert int(aligned["ties_bf16"].prompts.max()) == LONG
    assert len(aligned["one_token"].together) == 1


def test_learner_layouts(models, aligned, learner, tmp_path):
    cases = {
        "tp2_ep2": ("moe_bf16", TP2_EP2),
        "pp2": ("moe_bf16", PP2),
        "ties_tp2_ep2": ("ties_bf16", TP2_EP2),
        "wide_tp2": ("wide_bf16", TP2_EP2),
        "tied_tp2": ("tied_bf16", TP2),
        "one_token_tp2_ep2": ("one_token", TP2_EP2),
        "qwen2_tp2": ("qwen2_fp32", TP2),
    }
    assert_layouts(models, aligned, tmp_path, cases, 2)


def assert_layouts(models, found: dict[str, Results], out: Path, cases: dict[str, tuple], world: int) -> None:
    scored = score(models, found, out, cases, world)
    assert {case: differing(scored[case], found[name].together) for case, (name, _) in cases.items()} == dict.fromkeys(
        cases, 0
    )


def test_broken_hooks_are_named(aligned, aligned_out):
    found = json.loads((aligned_out / "controls.json").read_text())
    assert "model.layers.0.input_layernorm (RMSNorm)" in found.pop("a layer is not replaced")
    assert found.pop("a layer is passed by").endswith("2 layers were built and passed by: InvariantAttentionImpl")
    assert "k_norm.weight differs" in found.pop("a refit goes wrong")
    assert found.pop("nothing") == found.pop("a refit goes right") == ""
    assert len(found) == 2
    for name, error in found.items():
        assert f"the engine's parameter {name}" in error
