"""The loop with a fake engine and fake ranks: the order of calls, what is kept as best, and the advantages."""

import io

import numpy as np
import pytest
from rich.console import Console

from megatron_rlzero import loop
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.metrics import RunLog, read_metrics
from megatron_rlzero.summary import table
from tests.unit.world import World, config, rollout


def evaluation(version):
    return [("sampled", version), ("greedy", version), ("score", version), ("log evaluation", version)]


def test_one_update_in_full():
    assert World().run(loop_updates=1).calls == [
        ("push", 0),
        ("set_version", 0),
        *evaluation(0),
        ("export", "best", 0),
        ("take", 0),
        ("step", 0),
        ("push", 1),
        ("set_version", 1),
        ("log", 0),
        *evaluation(1),
        ("export", "policy", 1),
    ]


def test_each_update_once_and_weights_before_their_version():
    world = World().run(loop_updates=5)
    assert world.of("take", "step") == [call for u in range(5) for call in (("take", u), ("step", u))]
    assert world.of("push", "set_version") == [c for v in range(6) for c in (("push", v), ("set_version", v))]
    assert [update for _, update in world.of("log")] == list(range(5))
    # The servers get new weights before the update is written down and before the next is waited for.
    order = world.of("set_version", "log", "take")
    assert order.index(("set_version", 2)) < order.index(("log", 1)) < order.index(("take", 2))


@pytest.mark.parametrize(
    ("every", "updates", "pushed"), [(1, 4, [0, 1, 2, 3, 4]), (2, 4, [0, 2, 4]), (3, 7, [0, 3, 6, 7]), (3, 2, [0, 2])]
)
def test_refits_every_so_many_versions_and_before_the_last_evaluation(every, updates, pushed):
    world = World().run(loop_updates=updates, refit_every=every)
    assert [v for _, v in world.of("push")] == [v for _, v in world.of("set_version")] == pushed
    for update, metrics in world.metrics.items():
        refitted = (update + 1) % every == 0
        assert metrics["refit/bytes"] == (1000.0 if refitted else 0.0)
        assert metrics["seconds/refit"] == (0.25 if refitted else 0.0)


@pytest.mark.parametrize(
    ("every", "refit", "versions"),
    [(0, 1, [0, 5]), (2, 1, [0, 2, 4, 5]), (5, 1, [0, 5]), (2, 3, [0, 2, 4, 5]), (9, 1, [0, 5])],
)
def test_evaluations_run_on_the_version_that_the_servers_hold(every, refit, versions):
    world = World().run(loop_updates=5, eval_every=every, refit_every=refit)
    assert [v for _, v in world.of("sampled")] == [v for _, v in world.of("greedy")] == versions
    assert list(world.evaluations) == versions
    for version in versions:
        at = world.calls.index(("sampled", version))
        assert world.calls[at : at + 4] == evaluation(version)
        earlier = [c for c in world.calls[:at] if c[0] in ("push", "set_version")]
        assert earlier[-2:] == [("push", version), ("set_version", version)]


@pytest.mark.parametrize(
    ("accuracy", "kept"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0]),
        ([0.3, 0.5, 0.5, 0.4], [0, 1]),
        ([0.3, 0.1, 0.2, 0.4], [0, 3]),
        ([0.1, 0.2, 0.3, 0.4], [0, 1, 2, 3]),
        ([0.9, 0.8, 0.7, 0.6], [0]),
    ],
)
def test_best_is_kept_only_when_it_is_better(accuracy, kept):
    world = World(accuracy=dict(enumerate(accuracy))).run(eval_every=1)
    assert world.of("export") == [*(("export", "best", v) for v in kept), ("export", "policy", 3)]
    assert [world.evaluations[v]["eval/sampled"] for v in range(4)] == pytest.approx(accuracy)


def test_mismatch_is_measured_at_equal_weights():
    found = [World(mismatch=m).run().evaluations[3] for m in (0.0, 0.125)]
    assert [e["mismatch/tokens"] for e in found] == [30.0, 30.0]
    assert [e["mismatch/differing_frac"] for e in found] == [0.0, 1.0]
    assert found[1]["mismatch/abs_diff_max"] == 0.125


def test_metrics_of_an_update():
    metrics = World().run().metrics[2]
    assert metrics["loss"] == -0.5
    assert metrics["grad_norm"] == 0.5
    assert metrics["grad_clipped"] == metrics["stepped"] == 1.0
    assert metrics["learning_rate"] == 1e-3
    assert metrics["tokens"] == 20
    assert metrics["reward/mean"] == 0.5
    assert metrics["entropy"] == 0.5
    assert metrics["rollout_kl/k1"] == -0.25
    assert metrics["lag/max"] == 0.0
    assert metrics["seconds/update"] >= metrics["seconds/learning"] >= 0


def test_the_batch_has_the_rollouts_in_their_order_with_their_advantages():
    (batch, *_) = World().run().batches
    assert batch.lengths.tolist() == [5] * 4
    assert batch.advantages.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_errors_stop_before_anything_is_pushed():
    class Broken(World):
        def step(self, batch):
            raise FloatingPointError("loss = nan")

    world = Broken()
    with pytest.raises(FloatingPointError):
        world.run()
    assert world.of("push") == [("push", 0)]
    assert world.of("export") == [("export", "best", 0)]


def advantages(name, rows):
    made = config(loop_advantage=name)
    rollouts = [rollout(0, item, sample, reward, failed=failed) for item, sample, reward, failed in rows]
    return loop.advantages(made, rollouts).tolist()


ROWS = [
    # item, sample, reward, failed
    (7, 0, 1.0, False),
    (7, 1, 0.0, False),
    (8, 0, 1.0, False),
    (8, 1, 5.0, True),
    (9, 0, 3.0, True),
    (9, 1, 3.0, True),
]


def test_failed_responses_get_no_advantage_and_do_not_count():
    assert advantages("batch_mean", ROWS) == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0, 0, 0])
    assert advantages("none", ROWS) == [1, 0, 1, 0, 0, 0]
    counted = [(*row[:3], False) for row in ROWS]
    assert advantages("batch_mean", counted)[0] != pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce_pp_baseline"])
def test_the_survivor_of_a_group_gets_no_advantage(name):
    """Item 8 has one response left, and nothing to compare it with."""
    found = advantages(name, ROWS)
    assert found[2:] == [0, 0, 0, 0]
    assert found[0] == -found[1] > 0
    whole = [(*row[:3], False) for row in ROWS]
    assert advantages(name, whole)[2] != 0


@pytest.mark.parametrize("name", ["batch_mean", "rloo", "none"])
def test_an_update_of_failures_is_zero(name):
    assert advantages(name, [(*row[:3], True) for row in ROWS]) == [0] * 6


def test_arrays_are_split_by_response():
    parts = loop.split([rollout(0, 0, actions=1), rollout(0, 1, failed=True), rollout(0, 2)], np.arange(10))
    assert [p.tolist() for p in parts] == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]]


def test_what_is_logged_is_what_the_summary_reads(tmp_path):
    """The loop with the real run directory, then the table of the finished run."""
    made = config(eval_every=2)
    made.run_dir = str(tmp_path / "run")
    world = World(accuracy={0: 0.2, 2: 0.4, 3: 0.6})
    with RunLog(made, Console(file=io.StringIO())) as log:
        loop.train(made, world, world, log, Saved())
    lines = read_metrics(made.run_dir)
    held_out = [line for line in lines if "eval/sampled" in line]
    assert [line["update"] for line in held_out] == [0, 2, 3]
    table([line for line in lines if "reward/mean" in line], held_out)


def test_the_probe_compares_a_fixed_batch_at_the_start_and_every_so_many_versions():
    world = World().run(loop_updates=6, probe_every=3, rollout_max_prompt_tokens=100, rollout_max_response_tokens=156)
    assert world.of("probe") == [("probe", v, 8) for v in (0, 3, 6)]  # 8 x 256 tokens are 2048
    assert World().run(loop_updates=2).of("probe") == []


def test_a_mismatch_at_equal_weights_stops_the_run_or_is_logged():
    with pytest.raises(RuntimeError, match=r"75 of 75 tokens differ .* by up to 0.25; first: response"):
        World(mismatch=0.25).run(probe_every=1, probe_on_mismatch="stop")
    assert World(mismatch=0.25).run(probe_every=1).of("step") == [("step", v) for v in range(3)]
    World().run(probe_every=1, probe_on_mismatch="log")


def test_tokens_of_the_present_version_are_compared_in_every_update():
    # The fake learner gives -1.25 in a step where the engine said -1.5, at equal weights.
    with pytest.raises(RuntimeError, match=r"12 of 12 tokens differ"):
        World().run(probe_on_mismatch="stop")
