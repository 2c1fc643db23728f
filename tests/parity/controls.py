"""Engines in which one of our hooks was broken on purpose; what they say."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megatron_rlzero.architectures import read_config
from tests.parity.engine import build, generate, stage


def error_of(action: Any, *arguments: Any) -> str:
    """The message of the RuntimeError that ``action`` raises, empty if it raises none."""
    try:
        action(*arguments)
    except RuntimeError as error:
        return str(error)
    return ""


def controls(model: str) -> dict[str, str]:
    """What is broken -> the error."""
    from vllm.model_executor.custom_op import op_registry_oot

    from megatron_rlzero.invariance import vllm_attention, vllm_checks

    run = {"prompts": [[1, 2, 3], [4]], "new_tokens": 2}
    found = {}
    llm = build(model, "fp32")
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    loaded, tensors, hf = worker.model_runner.model, load_file(Path(model) / "model.safetensors"), read_config(model)

    def check() -> None:
        vllm_checks.check_parameters(loaded, hf, tensors.__getitem__)

    found["nothing"] = error_of(check) + error_of(generate, llm, run, [0, 1])
    for name in ("model.layers.1.mlp.experts.routed_experts.w13_weight", "model.layers.0.self_attn.qkv_proj.weight"):
        parameter = loaded.get_parameter(name).data
        kept = parameter.clone()
        parameter.view(-1)[-1] += 1e-6  # one element of the last expert's up projection, or of the last value head
        found[name] = error_of(check)
        parameter.copy_(kept)
    transfer = worker.weight_transfer_engine
    for parameter in loaded.parameters():
        parameter.data += 1e-3
    stage(transfer, Path(model))
    del transfer.staged["model.layers.1.self_attn.k_norm.weight"]
    transfer.finish_weight_update()
    found["a refit goes wrong"] = error_of(check)
    stage(transfer, Path(model))
    transfer.finish_weight_update()
    found["a refit goes right"] = error_of(check)
    llm.llm_engine.engine_core.shutdown()

    ours = vllm_attention.InvariantAttentionImpl
    kept_forward, ours.forward = ours.forward, lambda *_, output, **__: output
    llm = build(model, "fp32")
    found["a layer is passed by"] = error_of(generate, llm, run, [0, 1])
    ours.forward = kept_forward

    del op_registry_oot["RMSNorm"]  # nothing runs after this
    found["a layer is not replaced"] = error_of(build, model, "fp32")
    return found
