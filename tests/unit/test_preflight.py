"""A configuration against what lies outside it: model directory, data, ports, run directory; with negatives."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from megatron_rlzero import checkpoint
from megatron_rlzero.config_io import parse
from megatron_rlzero.validation import load
from tests.unit.setups import HF, violations, write_model

HYBRID = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "full_attention", "mlp", "mamba"],
    "head_dim": 8,
    "intermediate_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 8,
}
EXPERTS = HYBRID | {
    "layers_block_type": ["linear_attention", "moe", "mlp", "moe"],
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 32,
}


def test_each_missing_part_of_the_model_directory_is_named(empty, good, tmp_path):
    assert "no such directory" in violations(empty, [*good, f"model.path={tmp_path}/none"])[0]
    bare = tmp_path / "bare"
    bare.mkdir()
    found = violations(empty, [*good, f"model.path={bare}"])
    assert [line.split(": ")[1].split(";")[0] for line in found] == [
        "no *.safetensors in it",
        "no tokenizer in it",
        "no config.json in it",
    ]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "gpt2"}, ["model_type = 'gpt2' is not known; known are llama, nemotron_h"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers = None"]),
        ({"num_hidden_layers": 0, "hidden_size": "64"}, ["hidden_size = '64'", "num_hidden_layers = 0"]),
        ({"attention_bias": True}, ["attention_bias = True"]),
        ({"num_hidden_layers": 3}, []),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4 and num_key_value_heads = 3"]),
        ({"model_type": "qwen3", "head_dim": 4, "intermediate_size": 97}, ["the model has intermediate_size = 97"]),
        ({"head_dim": 3, "intermediate_size": 97}, []),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}, ["= 6 columns", "= 10 rows"]),
        ({}, []),
        (HYBRID, []),
        (HYBRID | {"mamba_num_heads": 6}, ["n_groups = 4: only a divisor of mamba_num_heads = 6"]),
        (HYBRID | {"mamba_num_heads": 6, "n_groups": 3}, ["6 Mamba heads, not divisible"]),
        (HYBRID | {"layers_block_type": ["mamba", "conv"]}, ["['mamba', 'conv']"]),
        (HYBRID | {"layers_block_type": 5}, ["layers_block_type = 5"]),
        (HYBRID | {"layers_block_type": [["mlp"]]}, ["layers_block_type = [['mlp']]"]),
        (HYBRID | {"num_hidden_layers": 5}, ["num_hidden_layers = 5: only 4"]),
        (HYBRID | {"hybrid_override_pattern": "MM-M"}, ["hybrid_override_pattern = 'MM-M': only M*-M"]),
        (HYBRID | {"layers_block_type": ["mlp"] * 4}, ["no layer is a Mamba layer"]),
        (HYBRID | {"mamba_dt_min": 0.1}, ["mamba_dt_min = 0.1: only the name time_step_min"]),
        (HYBRID | {"time_step_min": -1, "conv_kernel": "4"}, ["conv_kernel = '4'", "time_step_min = -1"]),
        (HYBRID | {"layer_norm_epsilon": None, "n_group": None}, ["layer_norm_epsilon = None", "n_group = None"]),
        (HYBRID | {"num_nextn_predict_layers": 1}, ["num_nextn_predict_layers = 1"]),
        (HYBRID | {"mamba_head_dim": 12}, ["mamba_head_dim = 12, not a multiple of 8"]),
        (EXPERTS, []),
        (EXPERTS | {"intermediate_size": 130}, ["intermediate_size = 130, not divisible"]),
        (EXPERTS | {"n_group": 3}, ["n_group = 3: only groups of two or more of the 8 experts"]),
        (EXPERTS | {"n_group": 2, "topk_group": 3}, ["topk_group = 3: only up to n_group = 2"]),
        (EXPERTS | {"num_experts_per_tok": 9}, ["num_experts_per_tok = 9: only up to 8"]),
        (EXPERTS | {"moe_latent_size": -4, "norm_topk_prob": None}, ["norm_topk_prob = None", "moe_latent_size = -4"]),
    ],
)
def test_model_configurations(empty, good, tmp_path, changes, parts):
    write_model(tmp_path / "other", **changes)
    found = violations(empty, [*good, f"model.path={tmp_path}/other"])
    assert len(found) == len(parts)
    assert all(part in line for part, line in zip(parts, found, strict=True))


def test_settings_that_config_json_lacks_are_named(empty, good, tmp_path):
    directory = write_model(tmp_path / "other")
    (directory / "config.json").write_text(json.dumps({k: v for k, v in HF.items() if k != "rms_norm_eps"}))
    (found,) = violations(empty, [*good, f"model.path={directory}"])
    assert found.endswith("config.json has no rms_norm_eps; add it")


def test_a_wrapper_around_a_language_model_is_not_served(empty, good, tmp_path):
    wrapper = {"model_type": "NemotronH_Nano_Omni_Reasoning_V3", "llm_config": {**HF, **HYBRID}}
    directory = write_model(tmp_path / "omni")
    (directory / "config.json").write_text(json.dumps(wrapper))
    (found,) = violations(empty, [*good, f"model.path={directory}"])
    assert "wrapper around the language model is not served; give the language model" in found
    load(empty, [*good, f"model.path={directory}"], starting=False, weights=False)  # estimate takes it


def test_prefixes_of_hybrids_are_not_cached(empty, good, tmp_path):
    write_model(tmp_path / "hybrid", **HYBRID)
    change = [*good, f"model.path={tmp_path}/hybrid"]
    for name, value, faults in (("enable_prefix_caching", "true", 1), ("enable-prefix-caching", "true", 1)):
        found = violations(empty, [*change, f"rollout.engine_args={{{name}: {value}}}"])
        assert len(found) == faults and "cannot be cached by prefix; remove it" in found[0]
    assert violations(empty, [*change, "rollout.engine_args={enable_prefix_caching: false}"]) == []
    assert violations(empty, [*good, "rollout.engine_args={enable_prefix_caching: true}"]) == []


def test_mamba_heads_and_groups_divide_over_the_ranks(empty, good, tmp_path):
    write_model(tmp_path / "hybrid", **HYBRID | {"n_groups": 1, "ssm_state_size": 4})
    sizes = ["rollout.tensor_model_parallel_size=2", "learner.tensor_model_parallel_size=2"]
    found = violations(empty, [*good, f"model.path={tmp_path}/hybrid", *sizes])
    assert len([line for line in found if "4 Mamba heads in 1 groups, not divisible by it" in line]) == 2


def test_expert_parallel_size_of_a_dense_model(empty, good, tmp_path):
    write_model(tmp_path / "dense", model_type="qwen3", head_dim=8)
    change = [*good, f"model.path={tmp_path}/dense"]
    assert violations(empty, change) == []
    (found,) = violations(empty, [*change, "learner.expert_model_parallel_size=2"])
    assert "the model is dense" in found


def test_broken_model_configuration(empty, good, tmp_path):
    (write_model(tmp_path / "broken") / "config.json").write_text("{")
    (found,) = violations(empty, [*good, f"model.path={tmp_path}/broken"])
    assert "config.json cannot be read" in found


def test_taken_ports_are_named_and_free_ones_pass(empty, good):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (found,) = violations(empty, [*good, f"rollout.port={port}"], starting=True)
        assert found.startswith(f"rollout.port = {port}: port {port} is taken")
        assert (
            violations(empty, [*good, f"rollout.port={port}", "rollout.urls=[http://127.0.0.1:1]"], starting=True) == []
        )
        assert violations(empty, [*good, f"rollout.port={port}"], starting=False) == []
    assert violations(empty, [*good, f"rollout.port={port}"], starting=True) == []
    assert "do not all exist" in violations(empty, [*good, "rollout.port=65535", "rollout.servers=2"], starting=True)[0]


def test_run_directory(empty, good, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert violations(empty, good, starting=True) == []
    (run / "metrics.jsonl").touch()
    assert violations(empty, good, starting=True) == []  # what a start that failed leaves
    (run / "metrics.jsonl").write_text("{}\n")
    (found,) = violations(empty, good, starting=True)
    assert found.startswith(f"run_dir = {run}: already holds a run; remove it, choose another directory, or set check")
    assert violations(empty, good, starting=False) == []
    resumed = [*good, "checkpoint.resume=true"]
    (found,) = violations(empty, resumed, starting=True)
    assert found.startswith(f"run_dir = {run}: a run without a readable config.yaml")
    OmegaConf.save(OmegaConf.structured(parse(empty, resumed).config), run / "config.yaml")
    assert violations(empty, [*resumed, "learner.world_size=1", "loop.updates=7"], starting=True) == []
    newest = run / "checkpoints" / "version-00000009"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text("{")
    (found,) = violations(empty, resumed, starting=True)
    assert found.startswith("checkpoint.resume = True: ") and "is damaged" in found
    shutil.rmtree(newest)
    found = violations(empty, [*resumed, "seed=2", "environment.size=400"], starting=True)
    assert found == [
        "seed = 2: the run in run_dir began with 1; set it back, or choose another run_dir",
        "environment.size = 400: the run in run_dir began with 500; set it back, or choose another run_dir",
    ]
    (found,) = violations(empty, [*good, f"run_dir={run}/metrics.jsonl/deeper"], starting=True)
    assert "cannot write in" in found


def test_a_run_goes_on_with_as_many_prompts_as_it_had(empty, good, tmp_path):
    """The order of the prompts follows from their number: with another one, some would come twice."""
    data, run = tmp_path / "problems.jsonl", tmp_path / "run"
    lines = [json.dumps({"problem": f"{n} + 1", "answer": n + 1}) for n in range(600)]
    data.write_text("\n".join(lines))
    files = ["environment.kind=jsonl", f"environment.path={data}", f"environment.eval_path={data}"]
    resumed = [*good, *files, "checkpoint.resume=true"]
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    OmegaConf.save(OmegaConf.structured(parse(empty, resumed).config), run / "config.yaml")
    write_learner = lambda path: save_file({"weight": torch.zeros(1)}, f"{path}/rank-00000.safetensors")  # noqa: E731
    checkpoint.save(run, checkpoint.Saved(1, prompts=600), write_learner, keep=1)
    assert violations(empty, resumed, starting=True) == []
    data.write_text("\n".join([*lines[:-1], lines[0]]))  # another line, but as many
    assert violations(empty, resumed, starting=True) == []
    for others, count in (([*lines, lines[0]], 601), (lines[1:], 599)):
        data.write_text("\n".join(others))
        (found,) = violations(empty, resumed, starting=True)
        assert found.startswith(
            f"environment.path = {data}: {count} lines, and the run in run_dir has drawn its prompts"
        )


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_nccl_needs_a_gpu(empty, good):
    (found,) = violations(empty, [*good, "refit.backend=nccl"])
    assert found == "refit.backend = nccl: this machine has no NVIDIA GPU; set gloo"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_run_directory_without_permission(empty, good, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    (found,) = violations(empty, [*good, f"run_dir={locked}/run"], starting=True)
    assert "cannot write in" in found


def test_environment_faults_pass_through(empty, good, tmp_path):
    for change, part in (
        ("environment.task=spell_forward", "reasoning-gym has no such task"),
        ("environment.parameters.min_word_len=0", "min_word_len must be positive"),
        ("eval.prompts=1000", "eval.prompts = 1000: there are"),
    ):
        (found,) = violations(empty, [*good, change], starting=True)
        assert part in found
        assert violations(empty, [*good, change], starting=False) == []


def test_jsonl_files(empty, good, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"problem": "1+1?", "answer": 2}\n' * 8)
    kind = [*good, "environment.kind=jsonl"]
    found = violations(empty, kind, starting=True)
    assert [line.split(" = ")[0] for line in found] == ["environment.path", "environment.eval_path"]
    both = [*kind, f"environment.path={lines}", f"environment.eval_path={lines}"]
    assert violations(empty, both, starting=True) == []
    (found,) = violations(empty, [*both, "eval.prompts=9"], starting=True)
    assert "there are 8 held-out prompts" in found
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "1+1?"}\nx\n')
    found = violations(empty, [*both, f"environment.eval_path={bad}"], starting=True)
    assert [line.split(": ")[1] for line in found] == ["line 1", "line 2"]
