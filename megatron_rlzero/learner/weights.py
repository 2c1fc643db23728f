"""The learner's weights under their Hugging Face names: layout over the ranks, loading, assembling, exporting."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_rlzero.architectures import Architecture, language_model, language_prefix
from megatron_rlzero.architectures.layouts import Parallel, engine_layout, finest, learner_layout
from megatron_rlzero.checkpoints import CONFIG, WEIGHTS, open_checkpoint
from megatron_rlzero.invariance.megatron import PolicyModel
from megatron_rlzero.resharding.carried import Carried
from megatron_rlzero.resharding.directories import CheckpointError, carry_over, staged
from megatron_rlzero.resharding.layout import Box, Layout, whole_tensors
from megatron_rlzero.resharding.plan import plan
from megatron_rlzero.resharding.safetensors_files import SafetensorsWriter, Spec
from megatron_rlzero.resharding.streaming import view
from megatron_rlzero.resharding.transport import execute


class Weights:
    """Parameters of one rank's model.

    Attributes:
        layout: learner rank -> pieces it holds, the same on every rank.
        shapes: Hugging Face tensor -> shape, of the whole checkpoint.
        dtypes: Hugging Face tensor -> dtype of the learner's parameter.
        trained: the layout without buffers, which have no gradients.
        finest: the trained model in the smallest boxes to which any tensor-parallel size up to the slices cuts it.
        local: this rank's parameters and buffers by Megatron's name, with layer and expert numbers of the whole model.

    Raises:
        RuntimeError: the model has other parameters than the architecture's table says.
    """

    def __init__(
        self, policy: PolicyModel, family: Architecture, hf: dict[str, Any], dtype: torch.dtype, slices: int
    ) -> None:
        self.family, self.hf, self.dtype = family, hf, dtype
        self.shapes = family.tensors(hf)
        self.dtypes = {n: torch.float32 if n.endswith(family.FP32) else dtype for n in self.shapes}
        config = policy.config
        parallel = Parallel(
            dist.get_world_size(),
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.expert_model_parallel_size,
            config.expert_tensor_parallel_size,
        )
        self.layout = learner_layout(family, hf, parallel, slices)
        rules = family.parameters(hf, slices)
        self.local: dict[str, Tensor] = {_global_name(n, policy): p for n, p in policy.named_parameters()}
        buffers = {_global_name(n, policy): b for n, b in policy.named_buffers()}
        self.local |= {name: buffer for name, buffer in buffers.items() if name in rules}
        # Rows of the vocabulary that are all padding are in no piece.
        absent = {piece.local for piece in self.layout[dist.get_rank()]} - self.local.keys()
        if wrong := sorted(absent | (self.local.keys() - rules.keys())):
            raise RuntimeError(f"rank {dist.get_rank()}: model and table of {hf['model_type']} differ in {wrong[:5]}")
        self.trained = {
            rank: [piece for piece in pieces if not piece.tensor.endswith(family.BUFFERS)]
            for rank, pieces in self.layout.items()
        }
        self.finest = [piece for piece in finest(rules, slices) if not piece.tensor.endswith(family.BUFFERS)]

    def engine_layout(self, workers: int) -> Layout:
        """What each worker of an aligned server keeps as its parameters."""
        return engine_layout(self.family, self.hf, workers)

    def whole_layout(self, workers: int) -> Layout:
        """What each worker of a stock server needs, whose loaders take the checkpoint's tensors whole."""
        return {worker: whole_tensors(self.shapes) for worker in range(workers)}

    def load(self, directory: str | Path) -> None:
        """Copies this rank's pieces from a checkpoint of either kind, converting to the model's dtype.

        Raises:
            CheckpointError: lists the tensors that are missing, extra or misshapen.
        """
        source, pieces, faults = open_checkpoint(directory, self.family, self.hf)
        if faults:
            raise CheckpointError(*faults)
        mine = self.layout[dist.get_rank()]
        with torch.no_grad():
            for t in plan({0: pieces}, {0: mine}):
                self.local[t.target_local][t.target_box.slices].copy_(view(source[t.source_local], t.source_box))

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by local name, fp32."""
        return {name: tensor.main_grad for name, tensor in self.local.items() if isinstance(tensor, Parameter)}

    def assemble(self, gradients: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """Every tensor whole, on the CPU of rank 0; None on the other ranks.

        Args:
            gradients: fp32 ones in the place of the parameters.
        """
        layout, dtypes = self.layout, self.dtypes
        if gradients is not None:
            layout = self.trained
            dtypes = {n: torch.float32 for n in self.shapes if not n.endswith(self.family.BUFFERS)}
        source = {n: t.detach().cpu() for n, t in (self.local if gradients is None else gradients).items()}
        target = {n: torch.empty(self.shapes[n], dtype=d) for n, d in dtypes.items()} if dist.get_rank() == 0 else {}
        transfers = plan(layout, {0: whole_tensors({n: self.shapes[n] for n in dtypes})})
        execute(transfers, dist.get_rank(), dist.group.WORLD, source, target, dtypes)
        return target or None

    def export(self, directory: str | Path, origin: str | Path) -> None:
        """Writes a Hugging Face directory: the weights, and what else is in ``origin``.

        That is configuration and tokenizer files, and tensors that are not of the language model. Written beside the
        target and renamed when it is whole; an old directory of that name is replaced then.
        """
        tensors = self.assemble()
        if tensors is not None:
            names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
            carried = Carried(origin, language_prefix(self.hf))
            specs = {n: Spec(self.shapes[n], t.dtype) for n, t in tensors.items()}
            with staged(directory, replace=True) as partial:
                writer = SafetensorsWriter(partial, specs | carried.specs)
                for name, tensor in tensors.items():
                    writer.write(name, Box.whole(tensor.shape), tensor)
                carried.copy(writer, carried.specs)
                writer.close()
                carry_over(Path(origin), partial, WEIGHTS, (CONFIG,))
                config = json.loads((Path(origin) / CONFIG).read_text())
                language_model(config)["dtype"] = names[self.dtype]
                (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")  # last: it makes the directory whole
        dist.barrier()


def _global_name(local: str, policy: PolicyModel) -> str:
    """A parameter's name with layer and expert numbers of the whole model in the place of this rank's."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local)
    if not match:
        return local
    layer = policy.decoder.layers[int(match[1])]
    name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
    expert = re.fullmatch(r"(.*\.experts\.linear_fc[12]\.weight)(\d+)", name)
    return f"{expert[1]}{layer.mlp.local_expert_indices[int(expert[2])]}" if expert else name
