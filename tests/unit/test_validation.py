"""Every violation of a configuration at once: each rule alone, ten planted faults together, and their negatives."""

import re
from pathlib import Path

import pytest

from megatron_rlzero.config import Config
from megatron_rlzero.validation import load, validate
from tests.unit.setups import violations


def test_a_right_configuration_loads_typed(empty, good):
    config = load(
        empty, [*good, "learner.optimizer.lr=1e-3", "seed=${loop.updates}", "rollout.urls=[http://127.0.0.1:1]"]
    )
    assert isinstance(config, Config)
    assert config.learner.optimizer.lr == 1e-3
    assert config.seed == 100
    assert config.rollout.urls == ["http://127.0.0.1:1"]
    assert validate(config) == []


def test_the_quickstart_is_right_once_its_model_is_there(good, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "quickstart" / "qwen3_moe.yaml"
    found = violations(example, [f"run_dir={tmp_path}/run", good[1]], starting=True)
    assert found == []
    assert violations(example, [f"run_dir={tmp_path}/run", "model.path=/absent"], starting=True) != []


def test_ten_planted_faults_give_ten_lines(tmp_path, good):
    path = tmp_path / "ten.yaml"
    path.write_text(
        f"""
run_dir: {tmp_path}/run
model:
  path: {tmp_path}/base
  dtype: fp16
learner:
  world_size: 6
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: two
  expert_model_parallel_size: 0
  context_parallel_size: 2
  max_tokens_per_microbatch: 40
  optimiser: {{lr: 1e-3}}
rollout:
  temperature: 0
  max_prompt_tokens: 60
loop:
  max_lag: -1
  advantage: rloo
environment:
  task: spell_backward
  parameters: {{min_word_len: 4}}
  size: 500
eval:
  prompts: 8
"""
    )
    expected = {
        "model.dtype": "fp16",
        "learner.tensor_model_parallel_size": "4",  # 4 query heads, but 2 key-value heads
        "learner.pipeline_model_parallel_size": "two",
        "learner.expert_model_parallel_size": "0",
        "learner.context_parallel_size": "2",
        "learner.max_tokens_per_microbatch": "40",
        "learner.optimiser": "{'lr': 0.001}",
        "rollout.temperature": "0.0",
        "loop.max_lag": "-1",
        "loop.samples_per_prompt": "1",
    }
    # 60 + 16 tokens would also be too many for the model's 64 positions
    found = violations(path, ["rollout.max_response_tokens=4"], starting=True)
    print(*found, sep="\n")
    assert sorted(line.split(" = ")[0] for line in found) == sorted(expected)
    for key, value in expected.items():
        assert any(line.startswith(f"{key} = {value}: ") for line in found)
    assert len(found) == 10
    for line in found:
        assert re.fullmatch(r"\S+ = .+: .+; .+", line)
        assert "\n" not in line


ALONE = [
    # reading
    ("loop.lag=3", "loop.lag = 3: unknown key; did you mean loop.max_lag?"),
    ("nonsense.x=3", "nonsense = {'x': 3}: unknown key; known here: run_dir"),
    ("loop.updates=2.5", "loop.updates = 2.5: not an integer; write an integer, such as 100"),
    ("loop.updates=true", "loop.updates = True: not an integer"),
    ("learner.optimizer.lr=fast", "learner.optimizer.lr = fast: not a number; write a number, such as 0.0002"),
    ("learner.optimizer=3", "learner.optimizer = 3: not a section"),
    ("rollout.urls=http://127.0.0.1:1", "rollout.urls = http://127.0.0.1:1: not a list"),
    ("seed=${loop.nothing}", "seed = ${loop.nothing}: Interpolation key 'loop.nothing' not found"),
    ("loop.updates", "loop.updates: not an override; write section.key=value"),
    ("loop.updates=[", "loop.updates = [: not YAML"),
    ("run_dir=???", "run_dir = ???: missing; write a text; it has no default"),
    # values
    ("seed=-1", "seed = -1: too small; give 0 or more"),
    ("learner.world_size=0", "learner.world_size = 0: too small; give at least 1"),
    ("learner.max_tokens_per_microbatch=-5", "learner.max_tokens_per_microbatch = -5: too small"),
    ("rollout.max_num_seqs=0", "rollout.max_num_seqs = 0: too small"),
    ("learner.optimizer.lr=.inf", "learner.optimizer.lr = inf: not finite"),
    ("learner.optimizer.lr=.nan", "learner.optimizer.lr = nan: not finite"),
    ("learner.optimizer.lr=-1e-3", "learner.optimizer.lr = -0.001: too small"),
    ("learner.optimizer.clip_grad=-1", "learner.optimizer.clip_grad = -1.0: too small"),
    ("learner.optimizer.adam_beta2=1", "learner.optimizer.adam_beta2 = 1.0: out of range"),
    ("learner.optimizer.adam_eps=0", "learner.optimizer.adam_eps = 0.0: too small; give more than 0"),
    ("learner.optimizer.lr_decay_style=linear", "lr_decay_style = linear: unknown; one of constant, cosine"),
    ("rollout.max_failed_fraction=1.5", "rollout.max_failed_fraction = 1.5: out of range"),
    ("rollout.temperature=0", "rollout.temperature = 0.0: too small; give more than 0"),
    ("kernels=fast", "kernels = fast: unknown; one of aligned, stock"),
    ("reduction_slices=0", "reduction_slices = 0: too small; give at least 1"),
    ("reduction_slices=6", "reduction_slices = 6: not a power of two; give a power of two"),
    ("model.dtype=fp16", "model.dtype = fp16: unknown; one of fp32, bf16"),
    ("learner.recompute=half", "learner.recompute = half: unknown; one of none, selective, full"),
    ("loop.advantage=ppo", "loop.advantage = ppo: unknown; one of batch_mean, rloo"),
    ("environment.kind=text", "environment.kind = text: unknown; one of reasoning_gym, jsonl"),
    ("environment.prompt_template=hello", "environment.prompt_template = hello: the problem has no place in it"),
    ("learner.virtual_pipeline_model_parallel_size=2", "virtual (interleaved) pipeline stages are not supported"),
    ("learner.context_parallel_size=2", "context parallelism is not exact yet; set it to 1"),
    # layout and batch
    ("learner.world_size=3 learner.tensor_model_parallel_size=2", "learner.world_size = 3: not divisible by"),
    ("learner.expert_model_parallel_size=4", "does not divide tensor x data parallel size = 1 x 2"),
    (
        "learner.world_size=4 learner.pipeline_model_parallel_size=2 learner.expert_model_parallel_size=4",
        "does not divide tensor x data parallel size = 1 x 2",
    ),
    (
        "reduction_slices=1 learner.tensor_model_parallel_size=2",
        "reduction_slices = 1: not a multiple of learner.tensor_model_parallel_size = 2; raise it",
    ),
    (
        "reduction_slices=2 rollout.tensor_model_parallel_size=4",
        "reduction_slices = 2: not a multiple of rollout.tensor_model_parallel_size = 4; raise it",
    ),
    ("loop.prompts_per_update=7", "loop.prompts_per_update = 7: times samples_per_prompt = 7 responses"),
    ("refit.every=4", "refit.every = 4: above loop.max_lag + 1 = 3"),
    ("loop.advantage=grpo", "loop.samples_per_prompt = 1: loop.advantage = grpo compares"),
    ("learner.optimizer.lr_decay_style=cosine learner.optimizer.min_lr=1", "min_lr = 1.0: above lr = 0.0002"),
    ("learner.max_tokens_per_microbatch=39", "max_prompt_tokens + max_response_tokens = 40 tokens; set it to 40"),
    # against the model
    ("rollout.max_response_tokens=41", "rollout.max_response_tokens = 41: with max_prompt_tokens = 65 tokens"),
    (
        "learner.world_size=8 learner.tensor_model_parallel_size=8 reduction_slices=8",
        "4 attention heads",
    ),
    ("learner.world_size=4 learner.tensor_model_parallel_size=4", "2 key-value heads, and sharing one"),
    ("learner.world_size=5 learner.pipeline_model_parallel_size=5", "4 layers cannot be cut into 5 pipeline stages"),
    ("learner.world_size=3 learner.expert_model_parallel_size=3 loop.prompts_per_update=3", "8 experts, not divisible"),
    (
        "rollout.tensor_model_parallel_size=8 reduction_slices=8",
        "rollout.tensor_model_parallel_size = 8: the model has 4 attention",
    ),
    # addresses
    ("rollout.urls=[localhost:80]", "rollout.urls[0] = localhost:80: not the address of a server"),
    ("rollout.urls=[http://a]", "rollout.urls[0] = http://a: not the address"),
    ("rollout.urls=[http://a:x]", "rollout.urls[0] = http://a:x: not the address"),
    ("rollout.urls=[http://127.0.0.1:1,http://127.0.0.1:1/]", "rollout.urls[1] = http://127.0.0.1:1/: listed twice"),
    ("refit.interface=nowhere", "refit.interface = nowhere: this machine has no interface"),
    ("rollout.token_file=/nowhere/token", "rollout.token_file = /nowhere/token: cannot be read"),
    ("rollout.engine_args={data-parallel-size: 2}", "data-parallel-size = 2: not supported; remove it and start more"),
    ("rollout.engine_args={pipeline_parallel_size: 2}", "pipeline_parallel_size = 2: not supported; remove it"),
    ("rollout.urls=[{a: 1}]", "rollout.urls = [{'a': 1}]: Cannot convert 'dict' to string"),
]


@pytest.mark.parametrize(("change", "part"), ALONE, ids=[change for change, _ in ALONE])
def test_each_fault_alone_gives_one_line(empty, good, change, part):
    found = violations(empty, [*good, *change.split(" ")] if "{" not in change else [*good, change])
    assert len(found) == 1, found
    assert part in found[0]
    assert "; " in found[0]


NEIGHBOURS = [
    "loop.max_lag=0",
    "refit.every=3",
    "learner.max_tokens_per_microbatch=40",
    "rollout.max_response_tokens=40",
    "learner.optimizer.clip_grad=0",
    "rollout.max_failed_fraction=1",
    "learner.world_size=4 learner.tensor_model_parallel_size=2 learner.expert_model_parallel_size=4",
    "learner.world_size=4 learner.pipeline_model_parallel_size=4",
    "loop.advantage=grpo loop.samples_per_prompt=2",
    "rollout.tensor_model_parallel_size=4",
    "loop.prompts_per_update=7 loop.samples_per_prompt=2",
    "kernels=stock",
    "reduction_slices=1",
    "reduction_slices=2 learner.tensor_model_parallel_size=2",
]


@pytest.mark.parametrize("change", NEIGHBOURS)
def test_values_just_inside_the_rules_pass(empty, good, change):
    assert violations(empty, [*good, *change.split()]) == []


def test_a_later_good_value_mends_an_earlier_bad_one(empty, good):
    assert violations(empty, [*good, "loop.updates=x", "loop.updates=5"]) == []
    assert len(violations(empty, [*good, "loop.updates=5", "loop.updates=x"])) == 1


def test_missing_values_of_an_empty_file(empty, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = violations(empty, [])
    assert [line.split(" = ")[0] for line in found] == ["run_dir", "model.path"]


@pytest.mark.parametrize(
    ("text", "part"),
    [("a: [1", "not YAML"), ("- 1", "not a mapping"), ("seed: 1\nseed: 2", "not YAML"), (None, "No such file")],
)
def test_files_that_cannot_be_read_do_not_hide_the_rest(tmp_path, good, text, part):
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    found = violations(path, [*good, "loop.max_lag=-1"])
    assert len(found) == 2
    assert found[0].startswith(f"config = {path}: ")
    assert part in found[0]
    assert found[1].startswith("loop.max_lag = -1")


def test_world_size_of_the_launcher(empty, good):
    config = load(empty, good, starting=False)
    assert validate(config, starting=False, environ={"WORLD_SIZE": "2"}) == []
    (found,) = validate(config, starting=False, environ={"WORLD_SIZE": "4"})
    assert found.startswith("learner.world_size = 2: the launcher started WORLD_SIZE = 4 ranks; ")


def test_flags_that_the_project_sets_are_refused_before_anything_starts(empty, good):
    found = violations(empty, [*good, "rollout.engine_args={port: 5, max-num-seqs: 8, tensor_parallel_size: 2}"])
    assert [line.split(":")[0] for line in found] == [
        "rollout.engine_args.port = 5",
        "rollout.engine_args.tensor_parallel_size = 2",
    ]


def test_servers_elsewhere_need_a_secret_and_an_interface(empty, good, tmp_path):
    there = "rollout.urls=[http://10.0.0.9:8000]"
    found = violations(empty, [*good, there])
    assert [line.split(" = ")[0] for line in found] == ["rollout.token_file", "refit.interface"]
    assert all("10.0.0.9" in line for line in found)
    token = tmp_path / "token"
    settings = [*good, there, f"rollout.token_file={token}"]
    for text, mode, part in ((None, None, "cannot be read"), ("a" * 64, 0o640, "other users"), ("short", 0o600, "32")):
        if text is not None:
            token.write_text(text)
            token.chmod(mode)
        found = violations(empty, settings)
        assert len(found) == 2 and part in found[0] and str(token) in found[0]
    token.write_text("a" * 64 + "\n")
    assert [line.split(" = ")[0] for line in violations(empty, settings)] == ["refit.interface"]
