"""transformers' own model of a checkpoint: the independent implementation that ours are compared with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from megatron_rlzero.architectures import language_model, language_prefix
from megatron_rlzero.resharding.directories import CheckpointError


def load(directory: str | Path, dtype: torch.dtype) -> nn.Module:
    """The causal language model of a Hugging Face directory, for evaluation; of a wrapper its language model.

    Attention and experts are computed in plain torch, which takes every dtype.

    Raises:
        CheckpointError: transformers does not have the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = json.loads((Path(directory) / "config.json").read_text())
    settings: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if prefix := language_prefix(config):  # transformers passes over all other tensors
        settings["key_mapping"] = {f"^{re.escape(prefix)}": ""}
    with TemporaryDirectory() as alone:
        (Path(alone) / "config.json").write_text(json.dumps(language_model(config)))
        try:
            known = AutoConfig.from_pretrained(alone)
        except (KeyError, ValueError):  # a model_type that it has never heard of
            known = None
    if type(known) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = language_model(config)["model_type"]
        raise CheckpointError(f"{directory}: transformers has no model of model_type = {kind}")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, config=known, **settings).eval()
