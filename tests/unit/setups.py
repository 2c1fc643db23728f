"""A configuration that is right, for the tests that spoil it."""

import json

from megatron_rlzero.validation import ConfigError, load

HF = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def write_model(path, **changes):
    """A directory that looks like a checkpoint; only config.json is read."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**HF, **changes}))
    (path / "model.safetensors").touch()
    (path / "tokenizer.json").touch()
    return path


def violations(path, overrides, starting=False):
    try:
        load(path, overrides, starting=starting)
    except ConfigError as error:
        return error.violations
    return []
