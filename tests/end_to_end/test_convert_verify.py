"""``convert --verify``: a converted model computes what transformers computes, and another model does not."""

import sys
from pathlib import Path

import pytest
import torch

from tests.omni import make_omni
from tests.processes import run
from tests.tiny import LLAMA3, make_llama, make_nemotron_h, make_qwen3_moe

#: Megatron-Core's CPU shims stay out of the tests' own process.
SCRIPT = """
import sys
import torch
from megatron_rlzero import cli
from megatron_rlzero.architectures import read_config
from megatron_rlzero.learner.verify import largest_difference, learner_log_probs, transformers_log_probs

source, other, work, naming = sys.argv[1:]
arguments = ["--to", "megatron", "--tensor-model-parallel-size", "2", "--naming", naming, "--verify"]
assert cli.main(["convert", source, work + "/megatron", *arguments]) == 0
assert cli.main(["convert", work + "/megatron", work + "/hf", "--to", "hf", "--verify"]) == 0
difference = largest_difference(work + "/megatron", other)
assert difference > 0.1, difference
hf, tokens = read_config(source), torch.arange(64).view(1, -1)
if "time_step_min" in hf:
    wanted = transformers_log_probs(work + "/hf", tokens)
    for least, same in ((hf["time_step_min"], True), (0.0, False)):
        found = learner_log_probs(work + "/megatron", hf | {"time_step_min": least}, tokens)
        assert ((found - wanted).abs().max() < 1e-4) == same, least
"""


def make_omni_fp32(directory: Path, seed: int) -> Path:
    language = make_nemotron_h(directory.with_name(f"language{seed}"), seed)
    return make_omni(directory, language, dtype=torch.float32)


@pytest.mark.parametrize(
    ("make", "settings", "naming"),
    [
        pytest.param(make_qwen3_moe, {"num_experts": 6, "vocab_size": 101}, "gpt", marks=pytest.mark.full),
        (make_nemotron_h, {"vocab_size": 101}, "hybrid"),
        pytest.param(make_omni_fp32, {}, "hybrid", marks=pytest.mark.full),
        pytest.param(
            make_llama, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, "hybrid", marks=pytest.mark.full
        ),
    ],
)
def test_log_probs_are_those_of_transformers(tmp_path: Path, make, settings, naming):
    source, other = (make(tmp_path / f"model{seed}", seed=seed, **settings) for seed in (0, 1))
    done = run([sys.executable, "-c", SCRIPT, source, other, tmp_path, naming], 300.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest difference of log-probs to transformers: ") == 2
