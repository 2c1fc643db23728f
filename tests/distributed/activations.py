"""Bytes that a learner's forward pass leaves for its backward pass, counted tensor by tensor; one rank of a test.

``python -m tests.distributed.activations MODEL OUT`` for models MODEL/2 and MODEL/3 of so many layers.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.build import initialise_distributed
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.rollout import Rollout
from tests.tiny import learner_config

TOKENS = 512


def saved_bytes(model: Path, recompute: str, device: torch.device) -> int:
    """Of distinct storages that are not parameters."""
    learner = Learner(learner_config(model, model, world_size=1, recompute=recompute, dtype="bf16"), device)
    action, zeros = np.arange(TOKENS) > 10, np.zeros(TOKENS, np.float32)
    tokens = np.arange(TOKENS, dtype=np.int32) % 100
    rollout = Rollout(0, 0, 0, tokens, action, zeros, zeros.astype(np.int32), 1.0, "stop")
    parameters = {p.untyped_storage().data_ptr() for p in learner.parts.policy.parameters()}
    storages: dict[int, int] = {}
    forward = True

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if forward and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal forward
        forward = False  # what is recomputed from here on does not count
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        learner.backward(Batch.of([rollout], torch.ones(1)))
    return sum(storages.values())


def main() -> None:
    directory, out = Path(sys.argv[1]), Path(sys.argv[2])
    device, _ = initialise_distributed(learner_config(directory / "2", out, world_size=1))
    result = {}
    for recompute in ("none", "selective", "full"):
        two, three = (saved_bytes(directory / layers, recompute, device) for layers in ("2", "3"))
        result[recompute] = (three - two) / TOKENS
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
