"""Sizes of the two published models, from the config.json of their examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: name -> directory of config.json
MODELS = {"Qwen3-30B-A3B": "qwen3_30b_a3b", "Nemotron-3-Nano-30B-A3B": "nemotron_omni"}


class Sizes:
    """Sizes under one name each, and how many layers of each kind there are."""

    def __init__(self, model: str) -> None:
        config: dict[str, Any] = json.loads((EXAMPLES / MODELS[model] / "config.json").read_text())
        self.hidden, self.vocabulary = config["hidden_size"], config["vocab_size"]
        self.heads, self.kv_heads, self.dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.width, self.k = config["moe_intermediate_size"], config["num_experts_per_tok"]
        pattern = config.get("hybrid_override_pattern", "*E" * config["num_hidden_layers"])
        self.mamba_layers, self.attention_layers, self.expert_layers = (pattern.count(kind) for kind in "M*E")
        self.norms = len(pattern) + 1
        self.qwen = config["model_type"] == "qwen3_moe"  # gated experts, rotary embedding, norms of queries and keys
        self.experts = config["num_experts" if self.qwen else "n_routed_experts"]
        self.shared = config.get("moe_shared_expert_intermediate_size", 0)
        if self.mamba_layers:
            names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
            self.scan = H, P, G, N = tuple(config[name] for name in names)
            self.channels, self.taps, self.inner, self.groups = H * P + 2 * G * N, config["conv_kernel"], H * P, G
