"""A tiny Qwen3-MoE directory with a real tokenizer and chat template, problems for it, a configuration, an engine."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rlzero.config import Config
from megatron_rlzero.generation.engine import RolloutEngine
from megatron_rlzero.rollout import Rollout
from tests.fake_server import FakeServer, Reply

CHAT_TEMPLATE = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>{{ turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")


def save_tokenizer(path: Path) -> dict[str, int]:
    """Writes a tokenizer of single characters; token -> id."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return vocabulary


def save_model(path: Path, seed: int, **sizes: int) -> Path:
    """Writes a randomly initialised model of about 0.16 M parameters; ``sizes`` override its configuration."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary = save_tokenizer(path)
    torch.manual_seed(seed)
    values = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
        **sizes,
    }
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **values,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=vocabulary["<|end|>"],
            pad_token_id=vocabulary["<|pad|>"],
        )
    )
    model.save_pretrained(path)
    return path


def save_problems(path: Path, count: int) -> str:
    """A JSONL file of sums."""
    lines = (json.dumps({"problem": f"{n} + {n + 1} =", "answer": 2 * n + 1}) for n in range(count))
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def make_model():
    """``save_model``; tests cannot import this file."""
    return save_model


@pytest.fixture(scope="session")
def make_tokenizer():
    """``save_tokenizer``."""
    return save_tokenizer


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def make_config(model_directory: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function that makes a configuration with a run directory of its own."""

    def make() -> Config:
        run = tmp_path_factory.mktemp("run")
        config = Config(run_dir=str(run))
        config.model.path = str(model_directory)
        config.rollout.max_prompt_tokens = 32
        config.rollout.max_response_tokens = 64
        config.rollout.startup_timeout_s = 900.0
        config.refit.deadline_s = 30.0
        config.loop.updates = 4
        config.loop.max_lag = 1
        config.loop.prompts_per_update = 16
        config.eval.prompts = 8
        config.environment.kind = "jsonl"
        config.environment.path = save_problems(run / "train.jsonl", 40)
        config.environment.eval_path = save_problems(run / "eval.jsonl", 10)
        return config

    return make


@pytest.fixture
def attach(make_config):
    """A function that attaches an engine to fake servers with the given replies."""
    engines: list[RolloutEngine] = []

    def start(
        *replies: Reply, finished: Sequence[Rollout] = (), samples_per_prompt: int = 1, **rollout: Any
    ) -> tuple[RolloutEngine, list[FakeServer], Config]:
        config = make_config()
        config.loop.samples_per_prompt = samples_per_prompt
        for name, value in rollout.items():
            setattr(config.rollout, name, value)
        servers = [FakeServer(reply) for reply in replies]
        config.rollout.urls = [server.url for server in servers]
        engine = RolloutEngine(config, finished)
        engines.append(engine)
        engine.wait_ready()
        return engine, servers, config

    yield start
    for engine in engines:
        engine.close()
