"""A vLLM worker's side of a refit: weights are staged, validated, and only then swapped into the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rlzero.architectures import read_config
from megatron_rlzero.generation.rendezvous import LOOPBACK, REFUSED, from_json, join
from megatron_rlzero.invariance.vllm import Settings
from megatron_rlzero.resharding.transport import execute


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What rank 0 sends once: ``transfers`` as in rendezvous.to_json, ``shapes`` of all tensors of a model."""

    port: int
    learners: int
    workers: int
    shapes: dict[str, list[int]]
    dtype: str
    transfers: list[list[Any]]
    deadline_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the plan is known from the start."""


class RefitTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """start: staging tensors, all NaN. update: receive and validate. finish: vLLM loads the staged tensors."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the process group, then checks the plan against the checkpoint that the server started from.

        In this order, because the learner's ranks wait in the group for this one, also where it will refuse.
        """
        self.info = init_info
        self.dtype: torch.dtype = getattr(torch, init_info.dtype)
        parallel = self.parallel_config
        self.rank = init_info.learners + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.transfers = from_json(init_info.transfers, self.rank)
        self.shapes = {name: tuple(shape) for name, shape in init_info.shapes.items()}
        deadline = timedelta(seconds=init_info.deadline_s)
        store = TCPStore(LOOPBACK, init_info.port, None, False, deadline)
        self.group = join(store, self.rank, init_info.learners + init_info.workers, init_info.deadline_s)
        self._check_complete()

    def _check_complete(self) -> None:
        expected = checkpoint_shapes(Path(self.model_config.model))
        if self.shapes != expected:
            different = {
                name: (self.shapes.get(name), expected.get(name))
                for name in sorted(self.shapes.keys() | expected.keys())
                if self.shapes.get(name) != expected.get(name)
            }
            name, (ours, theirs) = next(iter(different.items()))
            raise ValueError(
                f"{REFUSED}: {len(different)} tensors differ from those of {self.model_config.model}; the first is "
                f"{name}, {ours} in the refit and {theirs} in the checkpoint (None: absent)"
            )
        received = Counter()
        for transfer in self.transfers:
            received[transfer.tensor] += transfer.box.numel
        for name, shape in self.shapes.items():
            if received[name] != torch.Size(shape).numel():
                raise ValueError(f"{REFUSED}: the plan brings {received[name]} elements of {name}{list(shape)}")

    def start_weight_update(self) -> None:
        """Staging is in host memory, where gloo writes; NaN shows what never came."""
        self.staged: dict[str, Tensor] = {
            name: torch.full(shape, torch.nan, dtype=self.dtype) for name, shape in self.shapes.items()
        }

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class's, without its wait for an accelerator: the staged tensors are in host memory."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError, beginning with REFUSED and naming a tensor, if one is not finite."""
        execute(
            self.transfers,
            self.rank,
            self.group,
            {},
            self.staged,
            self.dtype,
            timedelta(seconds=self.info.deadline_s),
        )
        for name, tensor in self.staged.items():
            if not bool(torch.isfinite(tensor).all()):
                count = int((~torch.isfinite(tensor)).sum())
                self.staged = {}
                raise ValueError(
                    f"{REFUSED}: {count} of {tensor.numel()} elements of {name} are not finite; the policy has "
                    "diverged, or a learner rank has sent memory that it never wrote"
                )

    def finish_weight_update(self) -> None:
        """vLLM's own layerwise reload, all layers in one bracket.

        Raises:
            RuntimeError: some parameter of the model got no weights, or others than those; the model is then unusable.
        """
        if self.device.type == "cpu":
            _unpack_experts(self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights((name, tensor.to(self.device)) for name, tensor in self.staged.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if Settings.from_environment().kernels == "aligned":
            from megatron_rlzero.invariance.vllm_checks import check_parameters  # stock servers never import it

            check_parameters(self.model, read_config(self.model_config.model), self.staged.__getitem__)
        self.staged = {}
        if missing := {name for name, _ in self.model.named_parameters()} - set(loaded):
            raise RuntimeError(f"no weights for {sorted(missing)[:5]} ({len(missing)} parameters); end this server")

    def shutdown(self) -> None:
        """The group ends with the process."""
        self.staged = {}


def _unpack_experts(model: torch.nn.Module) -> None:
    """vLLM packs experts for the CPU when it builds their kernel, once: without this a reload keeps the old ones."""
    for module in model.modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def checkpoint_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a directory's safetensors files; reads the headers only."""
    shapes = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes
