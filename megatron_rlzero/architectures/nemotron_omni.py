"""Nemotron-3 Nano Omni: the language model, a Nemotron-H, of a model that also sees and hears (NVIDIA, 2026).

``hf`` has the language model's settings, ``llm_config`` of config.json. Tensors of other names are carried along
(resharding/carried.py) and never trained. The engine runs no encoder of images or sound: rollouts serve the language
model from a directory of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_rlzero.architectures import WRAPPERS, nemotron_h

PREFIX = WRAPPERS["NemotronH_Nano_Omni_Reasoning_V3"]

FP32, BUFFERS = nemotron_h.FP32, nemotron_h.BUFFERS
unsupported, transformer_config, layer_pattern = (
    nemotron_h.unsupported,
    nemotron_h.transformer_config,
    nemotron_h.layer_pattern,
)
trace_points, rotary, mixer = nemotron_h.trace_points, nemotron_h.rotary, nemotron_h.mixer
parameters, engine_parameters, tensors = (
    partial(f, prefix=PREFIX) for f in (nemotron_h.parameters, nemotron_h.engine_parameters, nemotron_h.tensors)
)


def engine_models() -> dict[str, Any]:
    """None: see above."""
    return {}
