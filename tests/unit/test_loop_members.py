"""The loop where runs go on from a checkpoint, and where servers join: the order of calls."""

from types import SimpleNamespace

import pytest

from megatron_rlzero import checkpoint, loop
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.rollout_files import read_rollouts
from tests.unit.world import World, config

SERVER = SimpleNamespace(name="server-1", url="http://127.0.0.1:1", workers=1)


def run(world, tmp_path, saved=None, **more):
    made = config(**({"loop_updates": 6, "checkpoint_every": 2} | more))
    made.run_dir = str(tmp_path)
    loop.train(made, world, world, world, saved or Saved())
    return world


def test_a_run_goes_on_where_its_checkpoint_is(tmp_path):
    first = run(World(accuracy={0: 0.2, 4: 0.5}), tmp_path, loop_updates=4, eval_every=4)
    assert first.of("save") == [("save", 2), ("save", 4)]
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["version-00000002", "version-00000004"]
    saved = checkpoint.resume(tmp_path)
    assert (saved.version, saved.best, saved.sizes) == (4, 0.5, {"metrics.jsonl": 4})
    assert [(r.update, r.item) for r in saved.finished] == [(4, 3), (5, 0)]
    second = run(World(accuracy={6: 0.4}), tmp_path, saved)
    # The weights are loaded, and pushed before anything is asked of the servers; no evaluation is done twice.
    assert second.calls[:4] == [("load", 4), ("push", 4), ("set_version", 4), ("take", 4)]
    assert [u for _, u in first.of("step") + second.of("step")] == list(range(6))
    assert second.of("export") == [("export", "policy", 6)]  # 0.4 is not better than 0.5
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["version-00000004", "version-00000006"]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(World(), tmp_path)
    again = run(World(), tmp_path, checkpoint.resume(tmp_path))
    assert again.of("take", "step", "sampled", "save") == []


def test_without_checkpoints_nothing_is_written(tmp_path):
    assert run(World(), tmp_path, checkpoint_every=0).of("save") == []
    assert checkpoint.resume(tmp_path) == Saved()


def test_batches_are_kept(tmp_path):
    run(World(), tmp_path, loop_record_every=3)
    files = sorted((tmp_path / "rollouts").iterdir())
    assert [read_rollouts(file)[0].update for file in files] == [0, 3]
    assert [r.item for r in read_rollouts(files[1])] == [0, 1, 2, 3]


def joined(faults, **more):
    world = World(waiting=[SERVER], faults=faults)
    world.run(loop_updates=1, probe_every=1, **more)
    at = world.calls.index(("connect", "server-1"))
    return world, world.calls[at:]


def test_a_server_that_joins_gets_the_weights_and_is_probed_first():
    world, calls = joined({})
    assert calls[:5] == [
        ("connect", "server-1"),
        ("push", 0, "server-1"),
        ("probe", "server-1"),
        ("score", 0),
        ("attach", "server-1"),
    ]
    assert "joins" in world.notes[0]
    lost, _ = joined({"lost": True})  # while it was probed: the engine has told so
    assert not any("joins" in note for note in lost.notes)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"connect": "refused the weights"}, "refused the weights"),
        ({"push": "timed out"}, "timed out"),
        ({"probe": "server-1"}, "it is gone"),
    ],
)
def test_a_server_that_fails_is_turned_away(faults, reason):
    world, calls = joined(faults)
    assert ("turn away", "server-1", reason) in calls
    assert ("attach", "server-1") not in calls
    assert world.of("step") == [("step", 0)]


def test_a_server_with_other_bits_is_turned_away_unless_they_are_only_logged():
    class Differs(World):
        def score_rollouts(self, rollouts):
            self.mismatch = 0.25 if self.calls[-1] == ("probe", "server-1") else 0.0
            return super().score_rollouts(rollouts)

    for on_mismatch, call in (("stop", "turn away"), ("log", "attach")):
        world = Differs(waiting=[SERVER])
        loop.admit(config(probe_every=1, probe_on_mismatch=on_mismatch), world, world, world, 0)
        assert [c[0] for c in world.of("turn away", "attach")] == [call]
