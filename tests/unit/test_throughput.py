"""The throughput command's arithmetic: drawn lengths, the fit of step times, draining, the bound; and its client."""

from pathlib import Path

import numpy as np
import pytest

from megatron_rlzero.generation import requests
from tools.evidence import drawn_client, throughput, throughput_arms
from tools.evidence.drawn_client import KINDS, draw
from tools.evidence.throughput_arms import LAG, MEASURED, UPDATES, Sizes
from tools.evidence.throughput_bound import Fit, bound, drain, full

FIT = Fit(h=0.0, r=0.0, a=4.0, c=1.0)


def test_exponential_lengths_have_their_mean_and_tail_and_even_ones_have_none():
    drawn = np.array([draw("exponential", 50, 10_000, (1, 0, item, 0)) for item in range(20_000)])
    # ceil of an exponential variable of mean m is geometric, with mean 1 / (1 - exp(-1 / m))
    assert drawn.mean() == pytest.approx(1 / -np.expm1(-1 / 50), rel=0.02)
    assert (drawn > 150).mean() == pytest.approx(np.exp(-3), rel=0.1) and drawn.min() == 1
    assert {draw("even", 50, 10_000, (1, 0, item, 0)) for item in range(100)} == {50}


def test_a_length_depends_on_its_key_alone_and_never_exceeds_the_longest():
    keys = [
        (seed, epoch, item, sample) for seed in (1, 2) for epoch in (0, 1) for item in range(5) for sample in (0, 1)
    ]
    drawn = [draw("exponential", 1000, 100_000, key) for key in keys]
    assert drawn == [draw("exponential", 1000, 100_000, key) for key in keys] and len(set(drawn)) == len(keys)
    assert max(draw("exponential", 50, 60, (1, 0, item, 0)) for item in range(100)) == 60
    assert draw("even", 50, 40, (1, 0, 0, 0)) == 40 and draw("exponential", 1, 40, None) == 1
    with pytest.raises(ValueError, match="'odd': give one of exponential, even"):
        draw("odd", 50, 60, (1, 0, 0, 0))


def test_the_fit_finds_what_made_the_times():
    made = Fit(h=0.05, r=0.01, a=0.004, c=0.0001)
    points = [{"b": b, "n": n, "seconds": made.h + made.r * b + n * made.step(b)} for b in (1, 4, 16) for n in (10, 40)]
    found = Fit.of(points)
    assert (found.h, found.r, found.a, found.c) == pytest.approx((made.h, made.r, made.a, made.c))
    assert found.worst == pytest.approx(0, abs=1e-9)
    points[0]["seconds"] *= 2
    assert Fit.of(points).worst > 0.1


def test_points_that_cannot_be_fitted_are_refused():
    with pytest.raises(ValueError, match="two numbers of responses, each with two lengths"):
        Fit.of([{"b": b, "n": 10, "seconds": 1.0 + b} for b in (1, 2, 4, 8)])
    busy = [{"b": b, "n": n, "seconds": 1.0 + n / b} for b in (1, 4, 16) for n in (10, 40)]
    with pytest.raises(ValueError, match="was the machine busy"):
        Fit.of(busy)


def test_draining_counts_every_step_with_those_that_run_in_it():
    # 2 steps of both, 3 of one
    assert drain([2, 5], 2, FIT) == 2 * (4 + 2) + 3 * (4 + 1)
    assert drain([2, 5], 8, FIT) == drain([5, 2], 2, FIT)
    # one slot: one after the other
    assert drain([2, 5], 1, FIT) == 7 * (4 + 1)
    # the third takes the place of the first: 2 steps, 3 steps, 1 step
    assert drain([2, 5, 4], 2, FIT) == 2 * 6 + 3 * 6 + 1 * 5
    assert drain([2, 5], 2, Fit(0.5, 0.25, 4.0, 1.0)) == drain([2, 5], 2, FIT) + 0.5 + 2 * 0.25


def test_draining_is_a_count_of_tokens_at_a_server_that_is_always_full():
    lengths = [7] * 12
    assert drain(lengths, 4, FIT) == pytest.approx(full(sum(lengths), 12, 4, FIT))
    uneven = [1, 13] * 6
    assert drain(uneven, 4, FIT) > full(sum(uneven), 12, 4, FIT)


def test_the_bound_is_two_for_equal_parts_and_even_lengths_and_more_for_a_tail():
    even = [[10] * 8] * 3
    generation = drain(even[0], 8, FIT)
    found = bound(even, 8, LAG, FIT, 0.9 * generation, 0.1 * generation)
    assert found["speed_up"] == pytest.approx(2) and found["G_sync"] == pytest.approx(found["G_async"])
    # a learner that takes no time gains nothing from even lengths
    assert bound(even, 8, LAG, FIT, 0.0, 0.0)["speed_up"] == pytest.approx(1)
    tail = [[3] * 7 + [59]] * 3
    steady = full(80, 8, 8, FIT)
    best = bound(tail, 8, LAG, FIT, steady, 0.0)
    assert best["speed_up"] == pytest.approx(1 + drain(tail[0], 8, FIT) / steady) and best["speed_up"] > 2
    # more slots than there are prompts in flight stay empty
    assert bound(even, 1000, 2, FIT, 0.0, 0.0)["in_flight"] == 24


def test_the_measured_updates_leave_out_the_filling_and_the_emptying_of_the_queue():
    assert MEASURED.start >= LAG + 2 and len(MEASURED) >= 5
    # the last prompts are started when version UPDATES - 1 - LAG is there
    assert MEASURED.stop <= UPDATES - LAG - 1 + 1


def test_drawn_lengths_of_an_update_are_those_that_its_requests_ask_for():
    sizes = Sizes(batch=6, slots=4, mean=20, longest=80)
    drawn = throughput_arms.lengths(sizes, "exponential", 3)
    assert len(drawn) == 6 and len(set(drawn)) > 1 and drawn != throughput_arms.lengths(sizes, "exponential", 4)
    assert throughput_arms.lengths(sizes, "even", 3) == [20] * 6
    assert KINDS == ("exponential", "even")


def test_the_client_asks_for_the_drawn_length_and_accepts_no_other(monkeypatch):
    monkeypatch.setattr(requests, "body", requests.body)
    monkeypatch.setattr(requests, "parse", requests.parse)
    end, key = 7, (1, 0, 3, 0)
    drawn_client.install("exponential", 20)
    sent = requests.body("name", [1, 2], key, 1.0, 80, {end})["sampling_params"]
    n = draw("exponential", 20, 80, key)
    assert n > 1 and sent["max_tokens"] == n and sent["stop_token_ids"] == [] and sent["ignore_eos"]

    def answer(count: int, reason: str) -> dict:
        tokens = [3] * (count - 1) + [end]  # an end token is a token as any other
        content = [{"token_id": token, "logprob": -1.0} for token in tokens]
        spans = [{"start": 0, "end": count, "version": "0"}]
        return {"choices": [{"token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content},
                             "weight_versions": spans}]}  # fmt: skip

    assert len(requests.parse(answer(n, "length"), 80, {end}).tokens) == n
    for bad in (answer(n - 1, "length"), answer(n, "stop")):
        with pytest.raises(requests.BadAnswer):
            requests.parse(bad, 80, {end})


def test_the_pilots_choose_the_first_sizes_that_balance_the_parts_and_none_where_none_do(monkeypatch):
    listed = [Sizes(8, slots, 16, 16) for slots in (1, 2, 4)]
    monkeypatch.setattr(throughput, "KINDS", {"even": listed})
    learning = {1: 0.5, 2: 1.1, 4: 1.0}

    def timing(out, name, kind, sizes, *rest):
        slow_start = {"update": 0, "learning": 99.0, "generation": 1.0}
        steady = {"learning": learning[sizes.slots], "generation": 1.0}
        return {"rows": [slow_start, *({"update": u} | steady for u in throughput_arms.PILOT)]}

    monkeypatch.setattr(throughput_arms, "timing", timing)
    found, tried = throughput.pilot(Path(), "even", {})
    assert found == listed[1] and list(tried.values()) == pytest.approx([0.5, 1.1])
    learning.update({2: 1.3, 4: 1.6})
    found, tried = throughput.pilot(Path(), "even", {})
    assert found is None and len(tried) == 3


def test_a_result_of_other_settings_is_refused(tmp_path):
    file = tmp_path / "arm.json"
    assert throughput_arms.kept(file, {"cores": (0, 1)}) is None
    throughput_arms.saved(file, {"settings": {"cores": (0, 1)}, "rows": [1]})
    assert throughput_arms.kept(file, {"cores": (0, 1)})["rows"] == [1]
    with pytest.raises(ValueError, match="of other settings; remove it or choose another --out"):
        throughput_arms.kept(file, {"cores": (1, 0)})
