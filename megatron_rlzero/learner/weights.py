"""The learner's weights under their Hugging Face names: layout over the ranks, loading, assembling, exporting."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rlzero.architectures import Architecture
from megatron_rlzero.architectures.layouts import Parallel, engine_layout, finest, learner_layout
from megatron_rlzero.invariance.megatron import PolicyModel
from megatron_rlzero.resharding.layout import Layout, whole_tensors
from megatron_rlzero.resharding.plan import plan
from megatron_rlzero.resharding.transport import execute

#: A safetensors file of an exported directory holds at most this many bytes of tensors.
SHARD_BYTES = 5 * 10**9


class Weights:
    """Parameters of one rank's model.

    Attributes:
        layout: learner rank -> pieces it holds, the same on every rank.
        shapes: Hugging Face tensor -> shape, of the whole checkpoint.
        dtypes: Hugging Face tensor -> dtype of the learner's parameter.
        finest: the whole model in the smallest boxes to which any tensor-parallel size up to the slices cuts it.
        local: this rank's parameters by Megatron's name, with layer and expert numbers of the whole model.

    Raises:
        RuntimeError: the model has other parameters than the architecture's table says.
    """

    def __init__(
        self, policy: PolicyModel, family: Architecture, hf: dict[str, Any], dtype: torch.dtype, slices: int
    ) -> None:
        self.family, self.hf, self.dtype = family, hf, dtype
        self.shapes = family.tensors(hf)
        self.dtypes = dict.fromkeys(self.shapes, dtype)
        self.local: dict[str, Tensor] = {_global_name(n, policy): p for n, p in policy.named_parameters()}
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
        # Rows of the vocabulary that are all padding are in no piece.
        absent = {piece.local for piece in self.layout[dist.get_rank()]} - self.local.keys()
        if different := sorted(absent | (self.local.keys() - rules.keys())):
            raise RuntimeError(f"rank {dist.get_rank()}: model and table of {hf['model_type']} differ in {different[:5]}")
        self.finest = finest(rules, slices)

    def engine_layout(self, workers: int) -> Layout:
        """What each worker of an aligned server keeps as its parameters."""
        return engine_layout(self.family, self.hf, workers)

    def whole_layout(self, workers: int) -> Layout:
        """What each worker of a stock server needs, whose loaders take the checkpoint's tensors whole."""
        return {worker: whole_tensors(self.shapes) for worker in range(workers)}

    def load(self, directory: str | Path) -> None:
        """Copies this rank's pieces from a Hugging Face directory, converting to the model's dtype.

        Raises:
            ValueError: names a tensor that is missing or has another shape than the configuration implies.
        """
        with torch.no_grad(), _Checkpoint(directory) as checkpoint:
            for piece in self.layout[dist.get_rank()]:
                source = checkpoint.slice(piece.tensor, self.shapes[piece.tensor])[piece.box.slices]
                self.local[piece.local][piece.local_box.slices].copy_(source)

    def assemble(self, local: Mapping[str, Tensor] | None = None) -> dict[str, Tensor] | None:
        """Every tensor whole, on the CPU of rank 0; None on the other ranks.

        Args:
            local: other tensors of the same layout and one dtype, such as gradients; the parameters by default.
        """
        source = {name: tensor.detach().cpu() for name, tensor in (local or self.local).items()}
        dtype = next(iter(source.values())).dtype
        target = {n: torch.empty(s, dtype=dtype) for n, s in self.shapes.items()} if dist.get_rank() == 0 else {}
        transfers = plan(self.layout, {0: whole_tensors(self.shapes)})
        execute(transfers, dist.get_rank(), dist.group.WORLD, source, target, dict.fromkeys(self.shapes, dtype))
        return target or None

    def export(self, directory: str | Path, origin: str | Path) -> None:
        """Writes a Hugging Face directory: the weights, and configuration and tokenizer files of ``origin``.

        Written beside the target and renamed when it is whole; an old directory of that name is replaced then.
        """
        tensors = self.assemble()
        if tensors is not None:
            directory = Path(directory)
            partial = directory.with_name(directory.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for file in Path(origin).iterdir():
                if file.is_file() and not file.name.startswith("model") and file.suffix != ".safetensors":
                    shutil.copy2(file, partial / file.name)
            names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
            (partial / "config.json").write_text(json.dumps(self.hf | {"dtype": names[self.dtype]}, indent=2) + "\n")
            _write_shards(partial, tensors)
            if directory.exists():
                old = directory.with_name(directory.name + ".old")
                shutil.rmtree(old, ignore_errors=True)
                os.rename(directory, old)
                os.rename(partial, directory)
                shutil.rmtree(old)
            else:
                os.rename(partial, directory)
        dist.barrier()


class _Checkpoint:
    """Tensors of a Hugging Face directory, read by slices."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __enter__(self) -> _Checkpoint:
        self.files = [safe_open(f, "pt") for f in sorted(self.directory.glob("*.safetensors"))]
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()
        self.where.clear()

    def slice(self, name: str, shape: tuple[int, ...]):
        if name not in self.where:
            raise ValueError(f"{self.directory} has no tensor {name}, which its config.json implies")
        found = self.where[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(f"{self.directory}: {name} is {found.get_shape()}, config.json implies {list(shape)}")
        return found


def _global_name(local: str, policy: PolicyModel) -> str:
    """A parameter's name with layer and expert numbers of the whole model in the place of this rank's."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", local)
    if not match:
        return local
    layer = policy.decoder.layers[int(match[1])]
    name = f"decoder.layers.{layer.layer_number - 1}.{match[2]}"
    expert = re.fullmatch(r"(.*\.experts\.linear_fc[12]\.weight)(\d+)", name)
    return f"{expert[1]}{layer.mlp.local_expert_indices[int(expert[2])]}" if expert else name


def _write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    index = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    )
