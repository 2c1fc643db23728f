"""Layouts of learner ranks and engine workers hold every element of the model, whatever the sizes."""

from itertools import product

import pytest

from megatron_rlzero.architectures import qwen3, qwen3_moe
from megatron_rlzero.architectures.layouts import Parallel, engine_layout, learner_layout
from megatron_rlzero.resharding.layout import whole_tensors
from megatron_rlzero.resharding.plan import plan

HF = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
SLICES = 4


def written(transfers):
    total = {}
    for t in transfers:
        total[t.target] = total.get(t.target, 0) + t.box.numel
    return total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp, ep, pp", product((1, 2, 4), (1, 2, 3, 6), (1, 2, 3)))
def test_learner_layouts_are_whole(tp, ep, pp, tied):
    """From a checkpoint to every rank, and from the ranks to a checkpoint and to servers of three sizes."""
    hf = HF | {"tie_word_embeddings": tied}
    sizes = Parallel(12 * pp, tp, pp, ep)
    layout = learner_layout(qwen3_moe, hf, sizes, SLICES)
    checkpoint = whole_tensors(qwen3_moe.tensors(hf))
    held = {rank: sum(p.box.numel for p in pieces) for rank, pieces in layout.items()}
    assert written(plan({-1: checkpoint}, layout)) == held
    total = sum(p.box.numel for p in checkpoint)
    assert written(plan(layout, {-1: checkpoint})) == {-1: total}
    for workers in (1, 2, 4):
        engine = engine_layout(qwen3_moe, hf, workers)
        targets = {100 + worker: pieces for worker, pieces in engine.items()}
        wanted = {rank: sum(p.box.numel for p in pieces) for rank, pieces in targets.items()}
        assert written(plan(layout, targets)) == wanted
    replicas = 12 // tp
    dense = sum(p.box.numel for p in checkpoint if ".experts." not in p.tensor)
    assert sum(held.values()) >= replicas * dense + 12 // ep * (total - dense)


def test_experts_can_be_split_over_tensor_ranks():
    layout = learner_layout(qwen3_moe, HF, Parallel(4, 2, 1, 2, 2), SLICES)
    shapes = {(p.tensor, p.box.shape) for p in layout[3] if ".experts.5." in p.tensor and "layers.2" in p.tensor}
    name = "model.layers.2.mlp.experts.5"
    assert shapes == {
        (f"{name}.gate_proj.weight", (24, 64)),
        (f"{name}.up_proj.weight", (24, 64)),
        (f"{name}.down_proj.weight", (64, 24)),
    }
    checkpoint = whole_tensors(qwen3_moe.tensors(HF))
    assert written(plan(layout, {9: checkpoint})) == {9: sum(p.box.numel for p in checkpoint)}


def test_coordinates_are_megatrons():
    """World of 16: tensor ranks are neighbours, pipeline stages the halves, experts spread over a stage."""
    sizes = Parallel(16, 2, 2, 4)
    at = [sizes.coordinates(rank) for rank in range(16)]
    assert [c.tensor for c in at] == [0, 1] * 8
    assert [c.pipeline for c in at] == [0] * 8 + [1] * 8
    assert [c.expert for c in at] == [0, 1, 2, 3] * 4
    assert {c.expert_tensor for c in at} == {0}
    at = [Parallel(8, 2, 1, 2, 2).coordinates(rank) for rank in range(8)]
    assert [(c.expert, c.expert_tensor) for c in at] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2


def test_tied_output_layer_is_not_held_twice():
    hf = HF | {"tie_word_embeddings": True}
    for sizes, expected in ((Parallel(), {0}), (Parallel(2, pipeline_model_parallel_size=2), {0, 1})):
        layout = learner_layout(qwen3, hf, sizes, SLICES)
        holders = {r for r, pieces in layout.items() for p in pieces if p.tensor == "model.embed_tokens.weight"}
        assert holders == expected
        assert all(len({p.local for p in pieces if "embed" in p.tensor}) <= 1 for pieces in layout.values())
    assert all(p.local != "lm_head.weight" for p in engine_layout(qwen3, hf, 1)[0])
    assert any(p.local == "lm_head.weight" for p in engine_layout(qwen3, HF, 1)[0])


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"world_size": 6, "tensor_model_parallel_size": 4}, "world_size = 6 is not a multiple .* 4 x 1"),
        ({"world_size": 4, "expert_model_parallel_size": 3}, "3 x 1 does not divide the 4 ranks"),
        ({"world_size": 4, "expert_model_parallel_size": 4}, "expert_model_parallel_size = 4 .* 6 experts"),
        ({"world_size": 8, "tensor_model_parallel_size": 8}, "tensor-parallel size of 8"),
        ({"world_size": 4, "pipeline_model_parallel_size": 4}, "3 layers"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        learner_layout(qwen3_moe, HF, Parallel(**sizes), SLICES)


def test_30b_over_64_ranks_and_16_workers():
    """Qwen3-30B-A3B, TP4 x EP8 x PP2 to four servers of TP4: every element once, the senders' work shared."""
    hf = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "tie_word_embeddings": False,
    }
    assert sum(p.box.numel for p in whole_tensors(qwen3_moe.tensors(hf))) == 30_532_122_624
    layout = learner_layout(qwen3_moe, hf, Parallel(64, 4, 2, 8), SLICES)
    engine = engine_layout(qwen3_moe, hf, 4)
    targets = {64 + 4 * server + worker: engine[worker] for server in range(4) for worker in range(4)}
    transfers = plan(layout, targets)
    assert written(transfers) == {rank: sum(p.box.numel for p in pieces) for rank, pieces in targets.items()}
    sent = dict.fromkeys(layout, 0)
    for t in transfers:
        sent[t.source] += t.box.numel
    assert max(sent.values()) / (sum(sent.values()) / 64) < 1.1
