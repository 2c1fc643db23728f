"""Packing is whole, balanced and even; a microbatch says what a position predicts, and padding counts for nothing."""

import numpy as np
import pytest
import torch

from megatron_rlzero.learner.batch import Batch, Microbatch
from megatron_rlzero.learner.pack import pack
from megatron_rlzero.rollout import Rollout

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(10))
def test_every_response_once_within_capacity_and_as_many_microbatches_everywhere(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, int(random.integers(1, 40))).tolist()
    ranks = int(random.integers(1, 5))
    packed = pack(lengths, ranks, 64)
    assert packed == pack(lengths, ranks, 64)
    assert len(packed) == ranks
    assert len({len(of_rank) for of_rank in packed}) == 1
    microbatches = [m for of_rank in packed for m in of_rank]
    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in m) for m in microbatches]
    assert max(loads) <= 64
    assert all(m == sorted(m) for m in microbatches)
    if len(lengths) >= len(microbatches):
        assert min(loads) > 0
        # No response of the fullest would make it and the emptiest more even, beyond its own length.
        assert max(loads) - min(loads) <= max(lengths)


def test_tokens_are_balanced_over_the_ranks():
    lengths = [50, 10] * 16
    loads = [sum(lengths[i] for m in of_rank for i in m) for of_rank in pack(lengths, 2, 4096)]
    assert loads == [480, 480]
    in_turn = [sum(lengths[r::2]) for r in range(2)]
    assert in_turn == [800, 160]


def test_no_more_microbatches_than_needed():
    assert [len(r) for r in pack([10] * 8, 2, 40)] == [1, 1]
    assert [len(r) for r in pack([10] * 8, 2, 39)] == [2, 2]
    # 3 x 30 fit into 2 x 50 by their sum, but not whole.
    assert [len(r) for r in pack([30] * 3, 1, 50)] == [3]


def test_fewer_responses_than_ranks_leave_empty_microbatches():
    assert pack([5], 3, 10) == [[[0]], [[]], [[]]]
    assert pack([], 2, 10) == [[[]], [[]]]


def test_a_response_above_the_capacity_is_named():
    assert pack([3, 10], 1, 10)
    with pytest.raises(ValueError, match=r"response 1 has 11 tokens, learner.max_tokens_per_microbatch = 10; raise it"):
        pack([3, 11], 1, 10)


def rollout(tokens, action):
    return Rollout(
        update=0,
        item=0,
        sample=0,
        tokens=np.array(tokens, np.int32),
        action_mask=np.array(action, bool),
        logprobs=np.where(action, -np.array(tokens, np.float32) / 10, 0).astype(np.float32),
        versions=np.where(action, 0, -1).astype(np.int32),
        reward=1.0,
        finish_reason="stop" if any(action) else "failed",
    )


def batch():
    """Three responses: two actions; none; actions with a gap, as with a tool's output."""
    return Batch.of(
        [
            rollout([11, 12, 13, 14], [0, 0, 1, 1]),
            rollout([21, 22], [0, 0]),
            rollout([31, 32, 33, 34, 35], [0, 1, 0, 1, 1]),
        ],
        [2.0, 5.0, -1.0],
    )


def test_batch_is_flat_and_survives_bytes():
    made = batch()
    assert made.lengths.tolist() == [4, 2, 5]
    assert made.starts.tolist() == [0, 4, 6]
    assert made.tokens.dtype == torch.int64
    assert made.log_mu.dtype == made.advantages.dtype == torch.float32
    again = Batch.from_bytes(made.to_bytes())
    for name in ("lengths", "tokens", "action_mask", "log_mu", "advantages"):
        assert torch.equal(getattr(again, name), getattr(made, name))
        assert getattr(again, name).dtype == getattr(made, name).dtype
    assert Batch.of([rollout([1, 2], [0, 1])]).advantages.tolist() == [0.0]


def test_positions_are_aligned_with_what_they_predict():
    m = Microbatch.of(batch(), [0, 2], 1, CPU)
    third = 1 / 3
    assert m.tokens.tolist() == [[11, 12, 13, 14, 31, 32, 33, 34, 35]]
    # The last position of a response predicts nothing.
    assert m.targets.tolist() == [[12, 13, 14, 0, 32, 33, 34, 35, 0]]
    torch.testing.assert_close(m.weight, torch.tensor([0, 0.5, 0.5, 0, third, 0, third, third, 0]))
    predicted = m.weight > 0
    torch.testing.assert_close(m.log_mu[predicted], -m.targets[0][predicted] / 10)
    assert m.advantage.tolist() == [2.0] * 4 + [-1.0] * 5
    assert m.where.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert m.padding_mask is None
    assert m.packed.cu_seqlens_q.tolist() == [0, 4, 9]
    assert m.packed.cu_seqlens_q.dtype == torch.int32
    assert m.packed.max_seqlen_q == 5
    assert m.packed.qkv_format == "thd"


def test_weights_of_a_response_sum_to_one():
    m = Microbatch.of(batch(), [0, 1, 2], 1, CPU)
    sums = [float(part.sum()) for part in m.weight.split([4, 2, 5])]
    assert sums == pytest.approx([1.0, 0.0, 1.0])
    assert m.weight.isfinite().all()  # response 1 has no action, T = 0


def test_the_order_of_responses_is_that_of_the_list():
    m = Microbatch.of(batch(), [2, 0], 1, CPU)
    assert m.where.tolist() == [6, 7, 8, 9, 10, 0, 1, 2, 3]
    assert m.targets.tolist() == [[32, 33, 34, 35, 0, 12, 13, 14, 0]]
    assert m.responses == [2, 0]


@pytest.mark.parametrize(("multiple", "padding"), [(1, 0), (2, 1), (3, 0), (4, 3), (9, 0), (16, 7)])
def test_padding_is_a_document_of_its_own(multiple, padding):
    plain, m = Microbatch.of(batch(), [0, 2], 1, CPU), Microbatch.of(batch(), [0, 2], multiple, CPU)
    n = 9 + padding
    assert m.tokens.shape == m.targets.shape == (1, n)
    assert m.where.shape == m.log_mu.shape == m.advantage.shape == m.weight.shape == (n,)
    for name in ("where", "log_mu", "advantage", "weight"):
        assert torch.equal(getattr(m, name)[:9], getattr(plain, name))
    assert m.where[9:].tolist() == [-1] * padding
    assert m.weight[9:].eq(0).all()
    assert m.tokens[0, 9:].eq(0).all()
    assert m.packed.cu_seqlens_q.tolist() == [0, 4, 9] + [n] * bool(padding)
    assert m.packed.max_seqlen_q == max(5, padding)
    if padding:
        assert m.padding_mask.tolist() == [[False] * 9 + [True] * padding]
    else:
        assert m.padding_mask is None


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_microbatch_is_padding_alone(multiple):
    m = Microbatch.of(batch(), [], multiple, CPU)
    assert m.tokens.tolist() == m.targets.tolist() == [[0] * multiple]
    assert m.tokens.dtype == m.targets.dtype == torch.int64
    assert m.where.tolist() == [-1] * multiple
    assert m.weight.tolist() == m.advantage.tolist() == m.log_mu.tolist() == [0.0] * multiple
    assert m.packed.cu_seqlens_q.tolist() == [0, multiple]
    assert m.padding_mask.all()


def test_a_response_of_one_token_predicts_nothing():
    made = Batch.of([rollout([7], [0]), rollout([8, 9], [0, 1])], [1.0, 1.0])
    m = Microbatch.of(made, [0, 1], 1, CPU)
    assert m.targets.tolist() == [[0, 9, 0]]
    assert m.weight.tolist() == [0.0, 1.0, 0.0]
