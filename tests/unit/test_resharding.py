"""Boxes cut exactly, a plan writes every element once and shares the work, a transport moves what the plan says."""

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from megatron_rlzero.resharding import messages, transport
from megatron_rlzero.resharding.layout import Box, Piece, whole_tensors
from megatron_rlzero.resharding.plan import plan


def random_box(random, shape):
    corners = [sorted(random.choice(n + 1, 2, replace=False)) for n in shape]
    return Box(tuple(int(a) for a, _ in corners), tuple(int(b) for _, b in corners))


def count(shape, boxes):
    """How many of the boxes hold each element."""
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        held[box.slices] += 1
    return held


def test_box_of_a_shape():
    box = Box.whole([3, 4])
    assert (box.shape, box.numel, box.slices) == ((3, 4), 12, (slice(0, 3), slice(0, 4)))
    assert box.shift((2, -1)) == Box((2, -1), (5, 3))
    with pytest.raises(ValueError):
        box.shift((1,))


@pytest.mark.parametrize("shape", [(9,), (5, 7), (4, 5, 3)])
def test_intersection_and_difference_cut_exactly(shape):
    random = np.random.default_rng(0)
    overlaps = 0
    for _ in range(300):
        a, b = random_box(random, shape), random_box(random, shape)
        common = a.intersect(b)
        assert common == b.intersect(a)
        both = count(shape, [a]) & count(shape, [b])
        if common is None:
            assert not both.any()
            continue
        overlaps += 1
        assert np.array_equal(count(shape, [common]), both)
        rest = list(a.subtract(common))
        assert all(box.numel > 0 for box in rest)
        assert np.array_equal(count(shape, rest), count(shape, [a]) - both)
    assert 50 < overlaps < 300


def test_touching_boxes_do_not_meet():
    assert Box((0, 0), (2, 4)).intersect(Box((2, 0), (4, 4))) is None
    assert Box((0, 0), (2, 4)).intersect(Box((1, 0), (4, 4))) == Box((1, 0), (2, 4))
    assert list(Box((0,), (3,)).subtract(Box((0,), (3,)))) == []


def cut(random, box, times):
    """Random disjoint boxes that cover ``box``."""
    boxes = [box]
    for _ in range(times):
        outer = boxes.pop(int(random.integers(len(boxes))))
        inner = random_box(random, outer.shape).shift(outer.start)
        boxes += [inner, *outer.subtract(inner)]
    return boxes


def stored(random, tensor, box, local):
    """A piece that lies somewhere in a larger local tensor; (piece, shape of that)."""
    at = tuple(int(n) for n in random.integers(0, 3, len(box.start)))
    inside = Box.whole(box.shape).shift(at)
    return Piece(tensor, box, local, inside), tuple(n + 1 for n in inside.stop)


def layout_of(random, shapes, ranks, copies):
    """Every tensor cut at random, each box on ``copies`` of the ranks; (layout, rank -> local name -> shape)."""
    layout, local = {r: [] for r in range(ranks)}, {r: {} for r in range(ranks)}
    for tensor, shape in shapes.items():
        for i, box in enumerate(cut(random, Box.whole(shape), 4)):
            for rank in random.choice(ranks, copies, replace=False).tolist():
                piece, size = stored(random, tensor, box, f"{tensor}.part{i}")
                layout[rank].append(piece)
                local[rank][piece.local] = size
    return layout, local


FP32 = dict.fromkeys("abcd", torch.float32)
SHAPES = {"a": (6, 7), "b": (11,), "c": (3, 4, 5)}


def fill(layout, local, tensors):
    """rank -> local name -> tensor, NaN where no piece lies."""
    held = {r: {n: torch.full(s, torch.nan) for n, s in local[r].items()} for r in local}
    for rank, pieces in layout.items():
        for p in pieces:
            held[rank][p.local][p.local_box.slices] = tensors[p.tensor][p.box.slices]
    return held


@pytest.mark.parametrize("seed", range(8))
def test_every_target_element_is_written_once(seed):
    random = np.random.default_rng(seed)
    source, source_local = layout_of(random, SHAPES, 4, 2)
    target, target_local = layout_of(random, SHAPES, 3, 2)
    # Targets are ranks 2, 3, 4: two of them are sources as well.
    target, target_local = ({r + 2: v for r, v in x.items()} for x in (target, target_local))
    transfers = plan(source, target)
    assert transfers == plan(source, target)
    shuffled = {r: source[r] for r in (3, 1, 0, 2)}
    assert transfers == plan(shuffled, {r: target[r] for r in (4, 2, 3)})

    written = {r: {n: np.zeros(s, dtype=int) for n, s in target_local[r].items()} for r in target}
    for t in transfers:
        assert t.box.shape == t.source_box.shape == t.target_box.shape
        written[t.target][t.target_local][t.target_box.slices] += 1
        (held,) = [p for p in source[t.source] if p.local == t.source_local]
        assert (held.tensor, t.source_box) == (t.tensor, t.box.shift(np.subtract(held.local_box.start, held.box.start)))
        assert t.box.intersect(held.box) == t.box
    for rank, pieces in target.items():
        for name in target_local[rank]:
            wanted = count(target_local[rank][name], [p.local_box for p in pieces if p.local == name])
            assert np.array_equal(written[rank][name], wanted)

    tensors = {n: torch.randn(s) for n, s in SHAPES.items()}
    held = fill(source, source_local, tensors)
    found = {r: {n: torch.full(s, torch.nan) for n, s in target_local[r].items()} for r in target}
    for t in transfers:
        found[t.target][t.target_local][t.target_box.slices] = held[t.source][t.source_local][t.source_box.slices]
    wanted = fill(target, target_local, tensors)
    for rank in target:
        for name, tensor in wanted[rank].items():
            torch.testing.assert_close(found[rank][name], tensor, rtol=0, atol=0, equal_nan=True)


def whole(*names, shape=(4, 4)):
    return whole_tensors(dict.fromkeys(names, shape))


def sent(transfers):
    """rank -> elements that leave it."""
    total = {}
    for t in transfers:
        total[t.source] = total.get(t.source, 0) + (t.box.numel if t.source != t.target else 0)
    return total


def test_replicas_share_the_work():
    names = [f"t{i}" for i in range(12)]
    source = {r: whole(*names) for r in range(4)}
    transfers = plan(source, {4: whole(*names), 5: whole(*names)})
    assert sent(transfers) == dict.fromkeys(range(4), 6 * 16)
    # One owner alone has nobody to share with.
    assert sent(plan({0: whole(*names)}, {4: whole(*names), 5: whole(*names)})) == {0: 24 * 16}


def test_uneven_tensors_are_balanced_by_elements():
    names = {"big": (10, 10), **{f"small{i}": (10,) for i in range(10)}}
    pieces = whole_tensors(names)
    assert sent(plan({0: pieces, 1: pieces}, {2: pieces})) == {0: 100, 1: 100}


def test_own_copy_comes_first():
    source = {r: whole("a", "b") for r in range(3)}
    transfers = plan(source, {2: whole("a", "b"), 3: whole("a", "b")})
    assert [t.source for t in transfers if t.target == 2] == [2, 2]
    # A copy of one's own costs nothing, so it does not count as work.
    assert [t.source for t in plan(source, {0: whole("a"), 3: whole("b")})] == [0, 0]
    half = Piece("a", Box((0, 0), (2, 4)), "a", Box((0, 0), (2, 4)))
    transfers = plan({0: whole("a"), 1: [half]}, {1: whole("a")})
    assert [(t.source, t.box) for t in transfers] == [(1, half.box), (0, Box((2, 0), (4, 4)))]


def test_missing_elements_are_named():
    half = Piece("a", Box((0, 0), (2, 4)), "x", Box((0, 0), (2, 4)))
    with pytest.raises(ValueError) as error:
        plan({0: [half], 1: [half]}, {7: [Piece("a", Box.whole((4, 4)), "y", Box.whole((4, 4)))]})
    assert str(error.value) == "no source rank holds a[2, 0]:[4, 4], which target rank 7 needs for y"
    with pytest.raises(ValueError, match=r"no source rank holds b\[0, 0\]:\[4, 4\], which target rank 0"):
        plan({0: [half]}, {0: whole("b")})
    assert plan({0: [half]}, {7: [half]})


def test_two_pieces_for_one_element_are_refused():
    top, bottom = Box((0, 0), (3, 4)), Box((2, 0), (4, 4))
    twice = [Piece("a", top, "x", top), Piece("a", bottom, "x", bottom)]
    with pytest.raises(ValueError, match=r"target rank 5 would write a\[0, 0\]:\[3, 4\] and a\[2, 0\]:\[4, 4\] .*of x"):
        plan({0: whole("a")}, {5: twice})
    apart = [twice[0], Piece("a", bottom, "y", bottom)]
    assert plan({0: whole("a")}, {5: apart})


def test_a_target_may_keep_a_function_of_the_values():
    """vLLM keeps A = -exp(A_log)."""
    box = Box.whole((4, 4))
    kept = [Piece("a", box, "A", box, "negative_exp")]
    source, target = {"a": torch.randn(4, 4)}, {"A": torch.zeros(4, 4)}
    transport.execute(plan({0: whole("a")}, {0: kept}), 0, None, source, target, FP32)
    assert torch.equal(target["A"], -source["a"].exp())
    with pytest.raises(ValueError, match=r"source rank 3 keeps negative_exp of a.* cannot be sent"):
        plan({3: kept}, {0: whole("a")})


def on_ranks(size, f):
    """f(rank, gloo group) on one thread per rank; results by rank, the first error raised."""
    store, results, errors = HashStore(), {}, []

    def body(rank):
        try:
            results[rank] = f(rank, ProcessGroupGloo(store, rank, size, timedelta(seconds=20)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("message_bytes", [1, 100, 2**26])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transport_over_gloo(monkeypatch, message_bytes, dtype):
    monkeypatch.setattr(messages, "MESSAGE_BYTES", message_bytes)
    random = np.random.default_rng(1)
    source, source_local = layout_of(random, SHAPES, 2, 1)
    target, target_local = layout_of(random, SHAPES, 3, 2)
    transfers = plan(source, target)
    pairs = {(t.source, t.target) for t in transfers}
    assert len(pairs) == 6
    tensors = {n: torch.randn(s).to(dtype) for n, s in SHAPES.items()}
    held, wanted = fill(source, source_local, tensors), fill(target, target_local, tensors)
    held[2] = {}

    def rank_part(rank, group):
        own = [t for t in transfers if rank in (t.source, t.target)]  # as much as a server's worker knows
        mine = {n: t.to(dtype) for n, t in held[rank].items()}
        # Not contiguous, and a parameter: as a learner may hold them.
        mine = {n: torch.nn.Parameter(t.mT.contiguous().mT if t.dim() > 1 else t) for n, t in mine.items()}
        out = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in target_local[rank].items()}
        transport.execute(own, rank, group, mine, out, dict.fromkeys(SHAPES, dtype), timedelta(seconds=20))
        return out

    found = on_ranks(3, rank_part)
    for rank in range(3):
        for name, tensor in wanted[rank].items():
            torch.testing.assert_close(found[rank][name], tensor.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_messages_are_packed_up_to_the_limit(monkeypatch):
    transfers = plan({0: whole("a", "b", "c", "d")}, {1: whole("a", "b", "c", "d"), 2: whole("a")})
    sizes = lambda: [[t.tensor for t in m] for _, m in messages.messages(transfers, dict.fromkeys("abcd", 4))]  # noqa: E731
    assert sizes() == [["a", "b", "c", "d"], ["a"]]
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 128)
    assert sizes() == [["a", "b"], ["c", "d"], ["a"]]
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 127)
    assert sizes() == [["a"], ["b"], ["c"], ["d"], ["a"]]
    assert list(messages.messages([], {})) == []


def test_one_rank_copies_without_a_group():
    target = {"a": torch.zeros(4, 4)}
    source = {"a": torch.randn(4, 4)}
    transport.execute(plan({0: whole("a")}, {0: whole("a")}), 0, None, source, target, FP32)
    assert torch.equal(target["a"], source["a"])


def test_another_dtype_is_refused_by_name():
    transfers = plan({0: whole("a")}, {0: whole("a")})
    good, bad = {"a": torch.zeros(4, 4)}, {"a": torch.zeros(4, 4, dtype=torch.bfloat16)}
    for source, target in ((bad, good), (good, bad)):
        with pytest.raises(TypeError, match=r"a is torch\.bfloat16, but the transfer carries torch\.float32"):
            transport.execute(transfers, 0, None, source, target, FP32)


def test_a_peer_that_never_sends_is_noticed():
    transfers = plan({0: whole("a")}, {1: whole("a")})

    def rank_part(rank, group):
        if rank == 1:
            with pytest.raises(RuntimeError):
                transport.execute(transfers, 1, group, {}, {"a": torch.zeros(4, 4)}, FP32, timedelta(seconds=0.3))
            return "refused"

    assert on_ranks(2, rank_part)[1] == "refused"
