"""What the ranks of the checkpoint tests run: steps of a JSON file, all in one process group.

A step loads or saves a distributed checkpoint with Megatron-Core's own functions, in the learner's model or in a stock
GPTModel, and may say what it found; or it says what the learner's Mamba mixer and Megatron's save.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import mamba_mixer
from safetensors.torch import save_file
from torch import Tensor

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.rules import padded_vocab_size
from megatron_rlzero.invariance.megatron_layers import NormColumnLinear, RowLinear
from megatron_rlzero.invariance.megatron_mamba import Mixer
from megatron_rlzero.invariance.operators import OPERATORS
from megatron_rlzero.learner import cpu
from megatron_rlzero.learner.build import build, initialise_distributed, make_parallel_groups, transformer_config
from megatron_rlzero.learner.weights import Weights
from tests.tiny import learner_config


def learner(model: Path, sizes: dict):
    """The learner's model with NaN in every weight."""
    hf = read_config(model)
    config = learner_config(model, model, world_size=dist.get_world_size(), **sizes)
    policy = build(config, architecture(hf), hf, torch.device("cpu")).policy
    return poison(policy), Weights(policy, architecture(hf), hf, torch.float32, config.reduction_slices)


def stock(model: Path, sizes: dict) -> torch.nn.Module:
    """Megatron's GPTModel from its local spec, of the same sizes; experts one after the other."""
    hf = read_config(model)
    config = transformer_config(learner_config(model, model, **sizes), architecture(hf).transformer_config(hf))
    config.num_layers, config.activation_func, config.moe_grouped_gemm = (
        hf["num_hidden_layers"],
        torch.nn.functional.silu,
        False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    return poison(
        GPTModel(
            config,
            spec,
            vocab_size=padded_vocab_size(hf["vocab_size"], 1),
            max_sequence_length=64,
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
        )
    )


def poison(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def load(model: torch.nn.Module, checkpoint: str) -> None:
    """As Megatron-LM loads: everything the model asks for must be there."""
    entries = model.sharded_state_dict()
    for entry in entries.values():
        if isinstance(model, GPTModel) and model.config.num_moe_experts:
            # The local spec gives the norm before experts the key that TransformerEngine's has before a dense MLP.
            entry.key = entry.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    state = dist_checkpointing.load(entries, checkpoint)
    model.load_state_dict({name: state[name] for name in entries})


def save(model: torch.nn.Module, checkpoint: str, metadata: dict) -> None:
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=dict(metadata)), checkpoint)


def entries(model: torch.nn.Module, metadata: dict) -> dict[str, list]:
    """Key, offset and replica -> global shape, of everything saved of the experts; layers numbered as in GPTModel."""
    found, layers_in_one = {}, 1 if isinstance(model, GPTModel) else 2
    for entry in model.sharded_state_dict(metadata=dict(metadata)).values():
        for part in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            if ".experts." in part.key:
                kind = "object" if isinstance(part, ShardedObject) else "tensor"
                layer = part.key.split(".")[2]
                key = part.key.replace(f".{layer}.", f".{int(layer) // layers_in_one}.", 1)
                found[f"{kind} {key} {list(part.global_offset)} {list(part.replica_id)}"] = list(part.global_shape)
    return found


class GatedNorm(torch.nn.Module):
    """Stands in for the norm of mamba_ssm, of which Megatron's mixer saves the weight."""

    def __init__(self, size: int, *, device: object, dtype: torch.dtype, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))


def megatrons_mixer() -> type:
    """MambaMixer of Megatron's own source, run again as where mamba_ssm is installed."""
    triton = "mamba_ssm.ops.triton"
    for name, contents in {
        f"{triton}.layernorm_gated": {"RMSNorm": GatedNorm},
        f"{triton}.ssd_combined": dict.fromkeys(
            ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), lambda: None
        ),
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    spec = importlib.util.spec_from_file_location("megatron.core.ssm.with_mamba_ssm", mamba_mixer.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.MambaMixer


def mixer_entries(kind: type, model: Path, sizes: dict) -> dict[str, list]:
    """Name in the state and key -> global shape, offset and replica, and a tensor's local shape and dtype."""
    hf, settings = read_config(model), learner_config(model, model, dtype="bf16", **sizes)
    config = transformer_config(settings, architecture(hf).transformer_config(hf))
    config.operators, config.reduction_slices = OPERATORS["aligned"], 8
    submodules = mamba_mixer.MambaMixerSubmodules(in_proj=NormColumnLinear, out_proj=RowLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    mixer = kind(config, submodules, d_model=config.hidden_size, layer_number=1, pg_collection=groups)
    found = {}
    for name, entry in mixer.sharded_state_dict(prefix="decoder.layers.0.mixer.").items():
        for part in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            values = [list(x) for x in (part.global_shape, part.global_offset, part.replica_id)]
            tensor = [] if isinstance(part, ShardedObject) else [list(part.local_shape), str(part.dtype)]
            found[f"{name} {part.key}"] = values + tensor
    return found


def states(policy: torch.nn.Module) -> dict[str, object]:
    """Names of TransformerEngine's states, with and without which it loads; whether an unknown name is refused."""
    kept = policy.state_dict()
    names = [name for name in kept if "_extra_state" in name]
    theirs = {name: torch.arange(7, dtype=torch.uint8) for name in names}
    for loaded in (kept, kept | theirs, {name: t for name, t in kept.items() if name not in theirs}):
        policy.load_state_dict(loaded)
    try:
        policy.load_state_dict(kept | {"decoder.final_norm.other_state": torch.zeros(1)})
    except RuntimeError as error:
        return {"names": names, "refused": "other_state" in str(error)}
    return {"names": names, "refused": False}


def run(step: dict, out: Path) -> None:
    model, sizes = Path(step["model"]), step.get("sizes", {})
    if step["kind"] == "mixers":
        found = [mixer_entries(kind, model, sizes) for kind in (Mixer, megatrons_mixer())]
        (out / f"{step['entries']}.{dist.get_rank()}.json").write_text(json.dumps(found))
        return
    weights = None
    if step["kind"] == "learner":
        policy, weights = learner(model, sizes)
    else:
        policy = stock(model, sizes)
    with torch.no_grad():
        if step.get("from") == "hf":
            weights.load(model)
        elif "from" in step:
            load(policy, step["from"])
        if "to" in step:
            save(policy, step["to"], step.get("metadata", {}))
    if "entries" in step:
        (out / f"{step['entries']}.{dist.get_rank()}.json").write_text(json.dumps(entries(policy, step["metadata"])))
    if "states" in step:
        (out / step["states"]).write_text(json.dumps(states(policy)))
    if "export" in step:
        weights.export(step["export"], model)
    if "assemble" in step:
        tensors: dict[str, Tensor] | None = weights.assemble()
        if tensors is not None:
            save_file(tensors, out / step["assemble"])
    dist.barrier()


def main() -> None:
    path = Path(sys.argv[1])
    steps = json.loads(path.read_text())
    model = Path(steps[0]["model"])
    initialise_distributed(learner_config(model, path.parent))
    for step in steps:
        parallel_state.destroy_model_parallel()
        make_parallel_groups(learner_config(model, path.parent, **step.get("sizes", {})).learner)
        with cpu.device_mode():
            run(step, path.parent)
    dist.destroy_process_group()
