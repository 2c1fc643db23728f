"""Estimates from configurations alone: bytes of a rank, the refit's plan, and what to change where it does not fit."""

from functools import cache
from pathlib import Path

import pytest

from megatron_rlzero.architectures import read_config
from megatron_rlzero.cli import main
from megatron_rlzero.estimate import estimate
from megatron_rlzero.validation import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_30b_a3b"
ARGUMENTS = [str(EXAMPLE / "rl.yaml"), f"model.path={EXAMPLE}"]
PARAMETERS = 30_532_122_624


@cache
def of(*overrides):
    config = load(ARGUMENTS[0], [ARGUMENTS[1], *overrides], starting=False, weights=False)
    return estimate(config, read_config(EXAMPLE))


def test_the_30b_example():
    found = of()
    assert found.model_parameters == PARAMETERS
    assert len(found.ranks) == 64
    # Experts are 128 x 48 x 3 x 2048 x 768, each on 4 of the 64 ranks; the rest is split over 4, 8 times replicated.
    experts = 128 * 48 * 3 * 2048 * 768
    replicated = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and routers are whole on every tensor rank
    held = 4 * experts + 8 * (PARAMETERS - experts - replicated) + 32 * replicated
    assert sum(rank.parameters for rank in found.ranks) == 2 * held
    assert sum(rank.gradients for rank in found.ranks) == 4 * held
    # Distributed optimizer: every element's 12 bytes lie on one rank of its replicas, but for rounding up.
    split_once = 12 * (PARAMETERS - replicated + 4 * replicated)
    assert 0 <= sum(rank.optimizer for rank in found.ranks) - split_once < 64 * 24
    assert found.refit.imbalance < 1.1
    assert sum(found.refit.sent.values()) == sum(found.refit.received.values()) >= 4 * 2 * PARAMETERS
    assert len(set(found.refit.received.values())) == 1
    assert found.refit.seconds(1e9) == max(found.refit.received.values()) / 1e9
    assert found.flops[1] > found.flops[0]  # the output layer


def test_sizes_and_settings_count():
    base = of()
    most = lambda found, name: max(getattr(rank, name) for rank in found.ranks)  # noqa: E731
    assert most(of("learner.optimizer.use_distributed_optimizer=false"), "optimizer") > 4 * most(base, "optimizer")
    assert most(of("learner.recompute=none"), "activations") > 5 * most(base, "activations")
    assert most(of("learner.max_tokens_per_microbatch=40960"), "activations") == pytest.approx(
        2 * most(base, "activations")
    )
    # The first of two stages has two microbatches between forward and backward, the second one.
    first, last = base.ranks[0], base.ranks[-1]
    assert (first.stage, last.stage) == (0, 1) and first.activations > 1.4 * last.activations
    one = of("rollout.servers=1")
    assert sum(one.refit.sent.values()) * 4 == sum(base.refit.sent.values())


def test_what_does_not_fit_says_what_to_change(capsys):
    assert main(["estimate", *ARGUMENTS]) == 0
    assert "fits" in capsys.readouterr().out
    tight = ["learner.optimizer.use_distributed_optimizer=false", "learner.recompute=none"]
    assert main(["estimate", *ARGUMENTS, *tight, "--device-memory-gib", "64"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    lines = [line.strip() for line in out.splitlines() if line.startswith("  learner.")]
    assert any(line.startswith("learner.recompute=full: ") and line.endswith("GiB, fits") for line in lines)
    assert any(line.startswith("learner.max_tokens_per_microbatch=20480") for line in lines) is False  # already there
    assert main(["estimate", *ARGUMENTS, "--device-memory-gib", "12"]) == 1
    assert "raise rollout.tensor_model_parallel_size" in capsys.readouterr().out


def test_faults_of_the_configuration_are_listed(capsys):
    assert main(["estimate", *ARGUMENTS, "learner.pipeline_model_parallel_size=64", "learner.recompute=some"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert any(line.startswith("learner.recompute = some") for line in lines)
    assert all("safetensors" not in line and "tokenizer" not in line for line in lines)
