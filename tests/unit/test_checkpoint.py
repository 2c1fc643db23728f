"""Checkpoints are whole or absent, rollouts come back as they were, and lines of abandoned updates are set aside."""

import io
import time
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rlzero import checkpoint
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.config import Config
from megatron_rlzero.learner.checkpoint import boxes_of_range
from megatron_rlzero.metrics import RunLog, read_metrics
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.rollout_files import read_rollouts, write_rollouts
from megatron_rlzero.run_directory import check_replay
from tests.processes import wait_for
from tests.tiny import rollouts
from tests.unit.world import rollout


def learner_files(directory):
    save_file({"main/a/0": torch.zeros(3)}, f"{directory}/rank-00000.safetensors")


def write(run_dir, version, learner=learner_files, keep=2, finished=()):
    state = Saved(version, best=0.5, sizes={"metrics.jsonl": 7}, finished=finished)
    return checkpoint.save(run_dir, state, learner, keep)


def test_the_last_ones_are_kept(tmp_path):
    for version in (2, 4, 6):
        write(tmp_path, version)
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["version-00000004", "version-00000006"]
    saved = checkpoint.resume(tmp_path)
    assert (saved.version, saved.best, saved.sizes, saved.finished) == (6, 0.5, {"metrics.jsonl": 7}, [])
    assert saved.learner == tmp_path / "checkpoints" / "version-00000006" / "learner"


def test_what_is_not_whole_is_not_there(tmp_path):
    whole = write(tmp_path, 2)

    def killed(directory):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 4, killed)
    directory = whole.parent
    (directory / "version-00000006.partial" / "learner").mkdir(parents=True)  # killed while it was written
    (directory / "version-00000006.partial" / "state.json").write_text('{"version": 6}')
    (directory / "version-00000001").mkdir()  # killed while it was removed
    assert checkpoint.whole(tmp_path) == [whole]
    assert checkpoint.resume(tmp_path).version == 2
    assert write(tmp_path, 6).name == "version-00000006"  # what was left does not stand in the way
    assert not (directory / "version-00000001").exists()  # nor does it stay


def test_a_damaged_one_is_named(tmp_path):
    for file in ("rollouts.safetensors", "learner/rank-00000.safetensors", "state.json"):
        target = write(tmp_path, 2, finished=[rollout(2, 0)])
        (target / file).write_bytes((target / file).read_bytes()[:5])
        with pytest.raises(CheckpointError, match=r"version-00000002 is damaged: .*; remove it to resume from"):
            checkpoint.resume(tmp_path)
    target = write(tmp_path, 2)
    (target / "learner" / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"learner lacks \['rank-00000.safetensors'\]; remove it"):
        checkpoint.resume(tmp_path)


def test_replays_are_of_what_they_say(tmp_path):
    config = Config(run_dir=str(tmp_path))
    config.loop.prompts_per_update = 2
    for update in (2, 3):
        write_rollouts(tmp_path / f"{update}", [rollout(update, 0), rollout(update, 1)])
    target = str(write(tmp_path, 2))
    files = [str(tmp_path / "2"), str(tmp_path / "3")]
    assert check_replay(config, files, target) == check_replay(config, files, None) == []
    assert "give successive ones" in check_replay(config, files[::-1], None)[0]
    assert "give successive ones" in check_replay(config, [files[0], files[0]], None)[0]
    write_rollouts(tmp_path / "5", [rollout(5, 0), rollout(5, 1)])
    assert "of updates [3, 5]; give successive ones" in check_replay(config, [files[1], str(tmp_path / "5")], None)[0]
    assert "give that of update 3" in check_replay(config, files[1:], target)[0]
    assert "no such directory" in check_replay(config, files, f"{target}-nowhere")[0]
    assert "holds no rollouts" in check_replay(config, [f"{target}/learner/rank-00000.safetensors"], None)[0]
    config.loop.samples_per_prompt = 2
    assert len(check_replay(config, files, None)) == 2


def test_rollouts_come_back(tmp_path):
    kept = [*rollouts(5), rollout(3, 1, failed=True)]
    write_rollouts(tmp_path / "kept", kept)
    for before, after in zip(kept, read_rollouts(tmp_path / "kept"), strict=True):
        for f in fields(before):
            one, other = getattr(before, f.name), getattr(after, f.name)
            if isinstance(one, np.ndarray):
                assert one.dtype == other.dtype and np.array_equal(one, other)
            else:
                assert one == other
    write_rollouts(tmp_path / "none", [])
    assert read_rollouts(tmp_path / "none") == []


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("{}")
    for name in ("text", "absent"):
        with pytest.raises(ValueError, match=name):
            read_rollouts(tmp_path / name)


def quiet():
    return Console(file=io.StringIO())


def test_lines_after_the_checkpoint_are_set_aside(tmp_path):
    made = Config(run_dir=str(tmp_path / "run"))
    made.model.path = "base"
    with RunLog(made, quiet()) as log:
        log.update(0, {"loss": 1.0})
        log.evaluation(1, {"sampled": 0.25}, [])
        sizes = log.sizes()
        for update in (1, 2):
            log.update(update, {"loss": 2.0})
    with pytest.raises(FileExistsError):
        RunLog(made, quiet())
    began = int(time.time())
    wait_for(lambda: int(time.time()) > began, 30.0)  # TensorBoard orders its files by the second of their start
    with RunLog(made, quiet(), Saved(version=1, sizes=sizes)) as log:
        log.update(1, {"loss": 3.0})
    run = tmp_path / "run"
    assert [line.get("loss") for line in read_metrics(run)] == [1.0, None, 3.0]
    assert (run / "abandoned.jsonl").read_text().count("\n") == 2
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1.0), (1, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/sampled")] == [(1, 0.25)]
    with RunLog(made, quiet(), Saved()):  # from the start, where no checkpoint had been made
        assert read_metrics(run) == []
    with pytest.raises(CheckpointError, match=r"metrics.jsonl has 0 bytes and the checkpoint counts on"):
        RunLog(made, quiet(), Saved(version=1, sizes=sizes))


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_a_range_is_cut_into_boxes(shape, data):
    numbers = np.arange(np.prod(shape))
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(numbers)), min_size=2, max_size=2)))
    whole = numbers.reshape(shape)
    boxes = list(boxes_of_range(tuple(shape), start, stop))
    found = np.concatenate([np.zeros(0, int), *(whole[box.slices].flatten() for box in boxes)])
    assert found.tolist() == list(range(start, stop))
    if (start, stop) == (0, len(numbers)):
        assert len(boxes) == 1
