"""Fixtures of the configuration tests."""

import pytest

from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_megatron
from tests.checkpoints import config, write
from tests.unit.setups import write_model


@pytest.fixture
def good(tmp_path, monkeypatch):
    """Overrides of a configuration that is right."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return [
        f"run_dir={tmp_path}/run",
        f"model.path={write_model(tmp_path / 'base')}",
        "rollout.max_prompt_tokens=24",
        "environment.task=spell_backward",
        "environment.size=500",
        "eval.prompts=8",
    ]


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


@pytest.fixture
def moe(tmp_path):
    return write(tmp_path / "moe", config("qwen3_moe"))


@pytest.fixture
def megatron(tmp_path, moe):
    to_megatron(moe, tmp_path / "megatron", smallest_world(2, 1, 2, 1))
    return tmp_path / "megatron"
