"""The run directory: what is written, when it is on disk, and what the progress line shows."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rlzero.config import Config
from megatron_rlzero.config_io import parse
from megatron_rlzero.metrics import COMPLETIONS, PLAIN_EVERY, RunLog, read_metrics
from megatron_rlzero.rollout import Rollout

METRICS = {
    "reward/mean": 0.25,
    "lag/mean": 1.5,
    "rollout_kl/k3": 1e-3,
    "tokens_per_second": 1234.0,
    "seconds/refit": 0.5,
}


def config(tmp_path, updates=25):
    made = Config(run_dir=str(tmp_path / "run"))
    made.model.path = "base"
    made.loop.updates = updates
    return made


def quiet():
    return Console(file=io.StringIO(), width=160)


def test_lines_are_on_disk_at_once(tmp_path):
    with RunLog(config(tmp_path), quiet()) as log:
        log.update(0, {"reward/mean": 0.5})
        assert read_metrics(log.run_dir) == [{"update": 0, "reward/mean": 0.5}]
        log.update(1, {"reward/mean": 0.75})
        assert read_metrics(log.run_dir)[1] == {"update": 1, "reward/mean": 0.75}


def response(item, prompt, answer):
    n, actions = len(prompt) + len(answer), [False] * len(prompt) + [True] * len(answer)
    return Rollout(
        update=-1,
        item=item,
        sample=0,
        tokens=np.array(prompt + answer, dtype=np.int32),
        action_mask=np.array(actions),
        logprobs=np.zeros(n, dtype=np.float32),
        versions=np.zeros(n, dtype=np.int32),
        reward=1.0,
        finish_reason="stop" if answer else "failed",
    )


def test_evaluations_keep_their_first_responses_and_their_own_names(tmp_path):
    greedy = [response(0, [5, 6], [7, 8]), response(1, [5], []), *[response(i, [1], [2]) for i in range(2, 6)]]
    with RunLog(config(tmp_path), quiet()) as log:
        log.evaluation(4, {"eval/greedy": 0.5, "mismatch/tokens": 3}, greedy)
        log.evaluation(5, {"eval/greedy": 0.6}, greedy)
    assert read_metrics(log.run_dir)[0] == {"update": 4, "eval/greedy": 0.5, "eval/mismatch/tokens": 3.0}
    lines = [json.loads(line) for line in (log.run_dir / "completions.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [4, 5]
    assert len(lines[0]["greedy"]) == COMPLETIONS
    assert lines[0]["greedy"][0] == {"item": 0, "prompt": [5, 6], "response": [7, 8], "reward": 1.0}
    assert lines[0]["greedy"][1] == {"item": 1, "prompt": [5], "response": [], "reward": 1.0}


def test_tensorboard_has_the_same_numbers(tmp_path):
    with RunLog(config(tmp_path), quiet()) as log:
        for update in range(3):
            log.update(update, {"reward/mean": update / 4})
    events = EventAccumulator(str(log.run_dir / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_saved_configuration_reads_back_as_it_was(tmp_path):
    made = config(tmp_path)
    made.environment.parameters = {"min_word_len": 4}
    made.learner.expert_model_parallel_size = 1  # what reading makes of the default
    made.learner.optimizer.lr = 3e-4
    with RunLog(made, quiet()) as log:
        pass
    parsed = parse(log.run_dir / "config.yaml")
    assert parsed.violations == {}
    assert parsed.config == made
    assert parsed.config != config(tmp_path)


def test_a_second_run_does_not_write_into_the_first(tmp_path):
    with RunLog(config(tmp_path), quiet()) as log:
        log.update(0, METRICS)
    with pytest.raises(FileExistsError, match="already holds a run; choose another"):
        RunLog(config(tmp_path), quiet())
    assert len(read_metrics(log.run_dir)) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_metrics_are_refused_by_name_and_not_written(tmp_path, value):
    with RunLog(config(tmp_path), quiet()) as log:
        with pytest.raises(ValueError, match="update 3: metric is/chi2 is"):
            log.update(3, {"reward/mean": 0.0, "is/chi2": value})
        assert read_metrics(log.run_dir) == []


def test_plain_output_is_one_line_in_ten_updates_and_each_evaluation(tmp_path):
    console = quiet()
    with RunLog(config(tmp_path, updates=25), console) as log:
        log.evaluation(0, {"eval/sampled": 0.25, "eval/greedy": 0.5}, [])
        for update in range(25):
            log.update(update, METRICS)
    lines = console.file.getvalue().splitlines()
    assert PLAIN_EVERY == 10
    assert [line.split()[1] for line in lines[1:]] == ["0/25", "10/25", "20/25", "24/25"]
    assert lines[0] == "held-out accuracy at version 0: sampled 0.250  greedy 0.500"
    assert lines[1] == "update 0/25  reward 0.250  lag 1.50  KL 1.0e-03  tokens/s 1,234  refit 0.50s"


def test_terminal_output_is_a_progress_line(tmp_path):
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    with RunLog(config(tmp_path, updates=2), console) as log:
        log.update(0, METRICS)
        log.update(1, METRICS)
    text = console.file.getvalue()
    assert "2/2" in text
    assert "tokens/s 1,234" in text
    assert "update 0/2" not in text


def test_reading_names_the_broken_line_and_the_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the run_dir of a run"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"update": 0}) + '\n{"update": 1, "rew')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)
