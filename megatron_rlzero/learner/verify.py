"""Compares a distributed checkpoint, loaded by Megatron-Core into the learner, with transformers on a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_rlzero.architectures import architecture, in_transformers, read_config
from megatron_rlzero.config import Config
from megatron_rlzero.kernels import libraries
from megatron_rlzero.learner import cpu
from megatron_rlzero.learner.batch import Batch, Microbatch
from megatron_rlzero.learner.build import build, make_parallel_groups
from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.torch_dist import TorchDistReader

SEQUENCES, LENGTH = 4, 64
#: largest difference of fp32 log-probabilities that passes
TOLERANCE = 1e-4


def largest_difference(checkpoint: str | Path, directory: str | Path) -> float:
    """Largest difference, in nats, of the log-probabilities of random tokens; both sides compute in fp32.

    Args:
        checkpoint: a distributed checkpoint under the names of HybridModel, or of GPTModel with layers on an axis.
        directory: Hugging Face directory, for transformers and for the model's configuration.

    Runs in one process without a process group of its own, on the CPU where there is no GPU.

    Raises:
        CheckpointError: Megatron-Core does not find what the learner's model needs.
    """
    hf = read_config(directory)
    length = min(LENGTH, hf["max_position_embeddings"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(hf["vocab_size"], (SEQUENCES, length), generator=generator)
    difference = (learner_log_probs(checkpoint, hf, tokens) - transformers_log_probs(directory, tokens)).abs().max()
    return float(difference)


def transformers_log_probs(directory: str | Path, tokens: Tensor) -> Tensor:
    """int64 [n, t] -> fp32 [n, t - 1]: log-probability of every token but the first.

    Raises:
        CheckpointError: transformers does not have the model.
    """
    model = in_transformers.load(directory, torch.float32)
    with torch.no_grad():
        return model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def learner_log_probs(checkpoint: str | Path, hf: dict[str, Any], tokens: Tensor) -> Tensor:
    """The same from the learner's model with the weights of a distributed checkpoint."""
    config = Config()
    config.model.dtype = "fp32"
    config.learner.tensor_model_parallel_size = config.learner.pipeline_model_parallel_size = 1
    config.learner.expert_model_parallel_size = 1
    gpu = torch.cuda.is_available()
    if not gpu:
        os.environ.update(libraries.settings())
        cpu.activate()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_parallel_groups(config.learner)
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        family = architecture(hf)
        policy = build(config, family, hf, device).policy
        _load(policy, checkpoint, family.layer_pattern(hf, 1))
        count, length = tokens.shape
        flat = tokens.flatten()
        batch = Batch(
            torch.full((count,), length), flat, torch.ones(len(flat), dtype=torch.bool), torch.zeros(len(flat)),
            torch.zeros(count),
        )  # fmt: skip
        packed = Microbatch.of(batch, list(range(count)), 1, device)
        with torch.no_grad(), cpu.device_mode():
            out = policy.eval()(packed.tokens, packed.targets, packed.packed, packed.padding_mask)
        return out[0, :, 0].cpu().view(count, length)[:, :-1]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _load(policy: torch.nn.Module, checkpoint: str | Path, pattern: str) -> None:
    reader = TorchDistReader(checkpoint)  # it refuses a harmful index, which Megatron would unpickle
    keys, objects = {chunk.key for chunk in reader.chunks.values()}, set(reader.objects)
    with torch.no_grad(), cpu.device_mode():
        state = policy.sharded_state_dict()
        if "decoder.final_layernorm.weight" in keys:
            retarget_sharded_state_dict_to_gpt_checkpoint(state, gpt_compatible_layer_maps(pattern))
        for name, entry in list(state.items()):
            if isinstance(entry, ShardedObject) and entry.unique_key not in objects:
                del state[name]  # states that only TransformerEngine's modules have
        # A factory's own key is not that of what it saves where it splits a tensor into blocks.
        parts = [e.build() if isinstance(e, ShardedTensorFactory) else [e] for e in state.values()]
        tensors = {part.key for built in parts for part in built if isinstance(part, ShardedTensor)}
        if absent := sorted(tensors - keys):
            raise CheckpointError(*(f"{key}: not in {checkpoint} under this name; --verify needs it" for key in absent))
        loaded = dist_checkpointing.load(state, str(checkpoint))
        policy.load_state_dict({n: t for n, t in loaded.items() if isinstance(t, Tensor)}, strict=False)
