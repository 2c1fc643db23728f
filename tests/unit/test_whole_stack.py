"""Long runs on the whole stack: the log-ratio's two terms, the task, the difficulties that all arms share."""

import json

import numpy as np
import pytest

from megatron_rlzero import diagnostics
from megatron_rlzero.rollout import Rollout
from tools.evidence import digits, stack, whole_stack
from tools.evidence.log_ratio import terms

UPDATE = 7


def rollout(draw, item, versions):
    """Two prompt tokens, then one action token per version."""
    n = len(versions)
    action = np.arange(2 + n) >= 2
    log_mu = np.where(action, -draw.random(2 + n), 0).astype(np.float32)
    return Rollout(
        UPDATE,
        item,
        0,
        np.arange(2 + n, dtype=np.int32),
        action,
        log_mu,
        np.array([-1, -1, *versions], np.int32),
        1.0,
        "stop",
    )


def test_the_terms_add_up_and_leave_out_what_is_not_known():
    draw = np.random.default_rng(0)
    rollouts = [rollout(draw, 0, [5, 6, 7]), rollout(draw, 1, [3, 6])]
    kernel = [np.full(5, 0.01, np.float32), np.zeros(4, np.float32)]
    age = [np.array([0, 0, 0.2, 0.1, 0], np.float32), np.array([0, 0, 0.4, 0.3], np.float32)]
    then = [(r.logprobs + k).astype(np.float32) for r, k in zip(rollouts, kernel, strict=True)]
    now = [(t + a).astype(np.float32) for t, a in zip(then, age, strict=True)]
    then[1][2] = np.nan  # version 3 is not kept
    found = terms(rollouts, then, now, UPDATE)
    assert (found["kernel/tokens"], found["kernel/differing"]) == (4, 3)
    assert found["kernel/abs_max"] == pytest.approx(0.01, rel=1e-3)
    d = np.array([0.01, 0.01, 0.01, 0])
    assert found["kernel/k3"] == pytest.approx(diagnostics.rollout_kl(d)["rollout_kl/k3"], rel=1e-3)
    d = np.array([0.2, 0.1, 0, 0.3])
    assert found["age/k3"] == pytest.approx(diagnostics.rollout_kl(d)["rollout_kl/k3"], rel=1e-4)
    assert found["age/rms"] == pytest.approx(np.sqrt((d**2).mean()), rel=1e-4)
    assert found["age/own_version_differing"] == 0
    now[0][4] += 0.5  # at the update's own version there is no age
    assert terms(rollouts, then, now, UPDATE)["age/own_version_differing"] == 1


def test_problems_have_right_answers_and_the_same_digits_at_every_difficulty(tmp_path):
    for difficulty in (3.0, 9.5):
        digits.write(tmp_path / f"{difficulty}.jsonl", 200, difficulty, "x")
    short, long = ([json.loads(line) for line in (tmp_path / f"{d}.jsonl").open()] for d in (3.0, 9.5))
    assert {len(p["problem"]) for p in short} == {1, 2, 3} and {len(p["problem"]) for p in long} == set(range(1, 11))
    for a, b in zip(short, long, strict=True):
        assert b["problem"].startswith(a["problem"])
        assert sorted(b["problem"]) == list(b["answer"])
    digits.write(tmp_path / "other.jsonl", 200, 9.5, "y")
    assert (tmp_path / "other.jsonl").read_bytes() != (tmp_path / "9.5.jsonl").read_bytes()


def test_the_first_arm_leads_and_the_others_get_its_difficulties(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "prepare", lambda *_: None)
    versions, written, rewards = {"first": 0, "second": 0}, [], {"first": 0.8, "second": 0.2}
    monkeypatch.setattr(stack.digits, "write", lambda path, count, difficulty, seed: written.append(difficulty))
    made = stack.Stack(tmp_path, {})
    first, second = (stack.Arm(name, 0) for name in versions)
    monkeypatch.setattr(made, "version", lambda arm: versions[arm.name])
    monkeypatch.setattr(made, "lines", lambda arm: [{"reward/mean": rewards[arm.name]}] * 300)

    def command(module, arm, override):
        versions[arm.name] += stack.CHUNK
        assert override == f"loop.updates={versions[arm.name]}"

    monkeypatch.setattr(made, "command", command)
    written.clear()
    made.go_on(first, 3 * stack.CHUNK, leads=True)
    assert written[0] == stack.FIRST and written == sorted(set(written))  # too easy: longer and longer
    leading = written.copy()
    written.clear()
    made.go_on(second, 3 * stack.CHUNK, leads=False)
    assert written == leading
    with pytest.raises(KeyError):
        made.go_on(second, 4 * stack.CHUNK, leads=False)


def test_figures_of_an_arm():
    x = {name: np.ones(2000) for name in whole_stack.SHOWN}
    x["rollout_kl/k3"][-500:] = 3.0
    x["kernel/differing"][700] = 2.0
    found = whole_stack.figures(x, [{"eval/sampled": 0.1}, {"eval/sampled": 0.5}])
    assert (found["KL last/first"], found["entropy last/first"]) == (3.0, 1.0)
    assert (found["of them differing"], found["k3 peak/median"]) == (2001.0, 3.0)
    assert (found["held-out first"], found["held-out last"]) == (0.1, pytest.approx(0.3))
