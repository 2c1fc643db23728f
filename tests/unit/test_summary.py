"""The table at the end of a run says what its metrics say, and the completions stand beside each other."""

import io
import json

import pytest
from rich.console import Console

from megatron_rlzero import summary
from megatron_rlzero.config import Config
from megatron_rlzero.summary import WINDOW, summarise, table


def update(u, **changes):
    """A line of metrics.jsonl with every metric of an update."""
    line = {
        "update": u,
        "reward/mean": u / 100,
        "lag/mean": 1.0,
        "lag/p99": 2.0,
        "lag/max": 2.0,
        "response/action_tokens": 100.0,
        "tokens": 1000,
        "tokens_per_second": 500.0,
        "seconds/update": 2.0,
        "seconds/learning": 0.5,
        "seconds/waiting_for_rollouts": 1.0,
        "seconds/waiting_for_learner": 0.125,
        "seconds/refit": 0.25,
        "seconds/generation": 0.75,
        "rollout_kl/k3": 1e-3,
    }
    return line | changes


def evaluation(version, sampled, greedy, tokens=100.0, differing=0.0, largest=0.0):
    return {
        "update": version,
        "eval/sampled": sampled,
        "eval/greedy": greedy,
        "eval/mismatch/tokens": tokens,
        "eval/mismatch/differing_frac": differing,
        "eval/mismatch/abs_diff_max": largest,
    }


def rows(made):
    """Label -> (before, after) of the table."""
    label, before, after = (list(column.cells) for column in made.columns)
    return {name: cells for name, *cells in zip(label, before, after, strict=True)}


def test_numbers_of_the_table():
    updates = [update(u) for u in range(50)]
    updates[7] |= {"lag/max": 3.0, "lag/p99": 2.0}
    held_out = [evaluation(0, 0.25, 0.5), evaluation(25, 0.9, 0.9), evaluation(50, 0.625, 0.75)]
    found = rows(table(updates, held_out))
    assert found["held-out accuracy, sampled"] == ["0.250", "0.625"]
    assert found["held-out accuracy, greedy"] == ["0.500", "0.750"]
    assert found[f"mean reward, {WINDOW} updates"] == ["0.095", "0.395"]
    assert found["lag of a token, mean / p99 / max"][1] == "1.00 / 2 / 3"
    assert found["mismatch at equal weights, tokens"][1] == "0 of 300"
    assert found["mismatch at equal weights, largest"][1] == "0.00e+00"
    assert found["tokens/s"][1] == "500"
    assert found["seconds, all updates"][1] == "100.0"
    assert found["seconds, learning"][1] == "25.0"
    assert found["seconds, refit"][1] == "12.5"
    assert found["seconds, waiting for rollouts"][1] == "50.0"


def test_mismatch_of_every_evaluation_counts():
    held_out = [evaluation(0, 0, 0, 100, 0.5, 1e-6), evaluation(1, 0, 0, 300, 0.0), evaluation(2, 0, 0, 50, 0.02, 2e-3)]
    found = rows(table([update(0)], held_out))
    assert found["mismatch at equal weights, tokens"][1] == "51 of 450"
    assert found["mismatch at equal weights, largest"][1] == "2.00e-03"


def test_lag_is_a_mean_over_tokens():
    uneven = [
        update(0, **{"lag/mean": 0.0, "response/action_tokens": 300.0}),
        update(1, **{"lag/mean": 2.0, "response/action_tokens": 100.0}),
    ]
    found = rows(table(uneven, [evaluation(0, 0, 0)]))
    assert found["lag of a token, mean / p99 / max"][1].startswith("0.50 /")
    nothing = [update(0, **{"lag/mean": 0.0, "response/action_tokens": 0.0})]
    assert rows(table(nothing, [evaluation(0, 0, 0)]))["lag of a token, mean / p99 / max"][1].startswith("0.00 /")


def test_short_runs_average_what_they_have():
    found = rows(table([update(0), update(10)], [evaluation(0, 0.1, 0.1)]))
    assert found["mean reward, 2 updates"] == ["0.050", "0.050"]
    assert found["held-out accuracy, sampled"] == ["0.100", "0.100"]


class Letters:
    """Token 1 is a, 2 is b, and so on."""

    def decode(self, tokens):
        return "".join(chr(96 + t) for t in tokens)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run of two updates."""
    config = Config(run_dir=str(tmp_path / "run"))
    config.model.path = "base"
    directory = tmp_path / "run"
    directory.mkdir()
    lines = [evaluation(0, 0.25, 0.5), update(0), update(1), evaluation(2, 0.75, 1.0)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    completion = lambda response: {"item": 0, "prompt": [3, 1, 2], "response": response, "reward": 0.0}  # noqa: E731
    versions = [{"version": v, "greedy": [completion(r)]} for v, r in ((0, [26]), (1, [25]), (2, [2, 1, 3]))]
    (directory / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in versions))
    paths = []
    monkeypatch.setattr(summary, "load_tokenizer", lambda path: paths.append(path) or Letters())
    return config, paths


def test_summary_of_a_run(run):
    config, paths = run
    out = io.StringIO()
    summarise(config, Console(file=out, width=200))
    text = out.getvalue()
    assert paths == ["base"]
    for part in ("2 updates", "0.250", "0.750", "0 of 200", "cab", "bac"):
        assert part in text
    assert "y" not in [cell.strip() for cell in text.replace("│", "|").split("|")]  # the response in between
    for name in ("metrics.jsonl", "plot.png", "policy", "best"):
        assert f"{config.run_dir}/{name}" in text


def test_completions_stand_beside_each_other(run):
    made = summary.completions(run[0])
    assert [list(column.cells) for column in made.columns] == [["cab"], ["z"], ["bac"]]
