"""The worked example of docs/adding_an_architecture.md: a hybrid outside the package converts, probes and trains."""

import json
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from megatron_rlzero.architectures import add, architecture
from megatron_rlzero.metrics import read_metrics
from tests import processes

FAMILY = Path(__file__).parents[2] / "examples" / "own_hybrid" / "tide.py"
HF = {
    "architectures": ["TideForCausalLM"],
    "model_type": "tide",
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "blocks": "sfsas",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "state_heads": 8,
    "state_head_dim": 16,
    "state_groups": 4,
    "state_size": 16,
    "ffn_size": 96,
    "norm_eps": 1e-5,
    "least_time_step": 0.01,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def tide(make_tokenizer, tmp_path_factory) -> Path:
    """A random checkpoint, made from the family's own table."""
    directory = tmp_path_factory.mktemp("tide")
    hf = HF | {"vocab_size": len(make_tokenizer(directory))}
    (directory / "config.json").write_text(json.dumps(hf))
    add(FAMILY)
    torch.manual_seed(0)
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in architecture(hf).tensors(hf).items()}
    tensors = {name: 1 + t if "norm" in name else t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def config(make_config, tide):
    made = make_config()
    made.run_dir += "/out"
    made.model.path, made.model.family = str(tide), str(FAMILY)
    made.rollout.max_response_tokens = 40  # past a chunk of the scan
    made.loop.updates, made.loop.max_lag = 2, 1
    made.probe.tokens = 500
    made.learner.world_size = made.learner.tensor_model_parallel_size = 2
    made.learner.optimizer.lr_warmup_updates = 0
    made.learner.optimizer.weight_decay = 0.1  # a random model earns no reward: this is what moves its weights
    return made


def run(command: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "megatron_rlzero", command, *arguments]
    process = processes.run(line, 1800.0)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def save(config) -> str:
    path = Path(config.run_dir).with_suffix(".yaml")
    OmegaConf.save(OmegaConf.structured(config), path)
    return str(path)


def test_it_probes(config):
    assert "0 of" in run("probe", save(config))


@pytest.mark.full
def test_it_trains(config):
    run("train", save(config))
    lines = read_metrics(config.run_dir)
    assert [line["update"] for line in lines if "reward/mean" in line] == [0, 1]
    held_out = [line for line in lines if "eval/sampled" in line]
    assert all(line["eval/mismatch/differing_frac"] == 0 < line["eval/mismatch/tokens"] for line in held_out)
    policy, base = (load_file(Path(d, "model.safetensors")) for d in (f"{config.run_dir}/policy", config.model.path))
    assert policy.keys() == base.keys()
    assert any(not torch.equal(policy[name], base[name]) for name in base)


def test_it_converts(tide, tmp_path):
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    sizes = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    run("convert", str(tide), str(megatron), "--to", "megatron", "--family", str(FAMILY), *sizes)
    run("convert", str(megatron), str(back), "--to", "hf", "--family", str(FAMILY))
    before, after = (load_file(directory / "model.safetensors") for directory in (tide, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
