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

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.layouts import engine_layout
from megatron_rlzero.generation.rendezvous import REFUSED, from_json, join
from megatron_rlzero.invariance.vllm import Settings
from megatron_rlzero.resharding.layout import whole_tensors
from megatron_rlzero.resharding.transport import execute


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What rank 0 sends once: ``transfers`` as in rendezvous.to_json, ``dtypes`` of all tensors of a checkpoint."""

    host: str
    port: int
    backend: str
    interface: str
    learners: int
    workers: int
    dtypes: dict[str, str]
    transfers: list[list[Any]]
    operators: str
    deadline_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The plan is known from the start; ``abandon`` ends a session that an earlier run left open."""

    abandon: bool = False


class RefitTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """start: staging tensors, NaN wherever the plan writes. update: receive and validate. finish: swap.

    With aligned kernels a worker's parameters are plain, and it stages and takes its own shards. Stock layers may pack
    weights in ways that only vLLM's loaders know: they stage the checkpoint's tensors whole and leave the rest to them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the process group, then checks the plan against the model that this worker built.

        In this order, because the learner's ranks wait in the group for this one, also where it will refuse.
        """
        self.info = init_info
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in init_info.dtypes.items()}
        parallel = self.parallel_config
        self.rank = init_info.learners + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.transfers = from_json(init_info.transfers, self.rank)
        self.aligned = Settings.from_environment().kernels == "aligned"
        deadline = timedelta(seconds=init_info.deadline_s)
        store = TCPStore(init_info.host, init_info.port, None, False, deadline)
        size = init_info.learners + init_info.workers
        self.group = join(store, self.rank, size, init_info.backend, init_info.interface, init_info.deadline_s)
        self._check_complete()

    def _check_complete(self) -> None:
        """Every element of every tensor that this worker stages comes, padding of the vocabulary apart."""
        hf = read_config(self.model_config.model)
        settings = Settings.from_environment()
        if self.aligned and settings.operators != self.info.operators:
            raise ValueError(
                f"{REFUSED}: operators are {self.info.operators} on the learner and {settings.operators} here; both "
                "need machines of one kind: one architecture of GPUs, or CPUs with g++ and AVX2 or without"
            )
        if self.aligned:
            from megatron_rlzero.invariance.vllm_checks import parameters  # stock servers never import it

            self.parameters = parameters(self.model)
            self.staging = {name: tuple(p.shape) for name, p in self.parameters.items()}
            wanted = engine_layout(architecture(hf), hf, self.parallel_config.world_size)[self.parallel_config.rank]
        else:
            self.staging = checkpoint_shapes(Path(self.model_config.model))
            wanted = whole_tensors(self.staging)
        expected, received = Counter(), Counter()
        for piece in wanted:
            expected[piece.local] += piece.box.numel
        for transfer in self.transfers:
            received[transfer.target_local] += transfer.box.numel
        names = sorted(self.staging.keys() | expected.keys() | received.keys())
        # Of a small vocabulary a worker may hold nothing but padding, which no piece brings.
        if wrong := [n for n in names if n not in self.staging or expected[n] != received[n]]:
            raise ValueError(
                f"{REFUSED}: {len(wrong)} tensors of worker {self.parallel_config.rank} differ between its model, "
                f"{self.model_config.model}, and the refit; the first is {wrong[0]}: {self.staging.get(wrong[0])} in "
                f"the model, {expected[wrong[0]]} elements expected, {received[wrong[0]]} in the refit"
            )

    def start_weight_update(self) -> None:
        """Staging is where the backend writes: gloo in host memory. NaN shows what never came."""
        device = self.device if self.info.backend == "nccl" else torch.device("cpu")
        dtypes = {t.target_local: self.dtypes[t.tensor] for t in self.transfers}
        self.staged: dict[str, Tensor] = {
            n: torch.zeros(self.staging[n], dtype=d, device=device) for n, d in dtypes.items()
        }
        for transfer in self.transfers:
            self.staged[transfer.target_local][transfer.target_box.slices] = torch.nan

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class's, without its wait for an accelerator: validation waits for what was received."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError, beginning with REFUSED and naming a tensor, if one is not finite; and to abandon."""
        if update_info.abandon:
            self.staged = {}
            raise ValueError("the session of an earlier run is abandoned")
        limit = timedelta(seconds=self.info.deadline_s)
        execute(self.transfers, self.rank, self.group, {}, self.staged, self.dtypes, limit)
        for t in self.transfers:
            part = self.staged[t.target_local][t.target_box.slices]
            if not bool(torch.isfinite(part).all()):
                count = int((~torch.isfinite(part)).sum())
                self.staged = {}
                raise ValueError(
                    f"{REFUSED}: {count} of {part.numel()} elements of {t.tensor} for {t.target_local} are not finite; "
                    "the policy has diverged, or a learner rank has sent memory that it never wrote"
                )

    def finish_weight_update(self) -> None:
        """All of the new weights take the places of the old ones.

        Raises:
            RuntimeError: vLLM's loaders gave some parameter no weights; the model is then unusable.
        """
        if self.aligned:
            for name, tensor in self.staged.items():
                self.parameters[name].copy_(tensor)
        else:
            self._reload()
        self.staged = {}

    def _reload(self) -> None:
        """vLLM's own layerwise reload, all layers in one bracket."""
        if self.device.type == "cpu":
            _unpack_experts(self.model)
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights((name, tensor.to(self.device)) for name, tensor in self.staged.items())
        finalize_layerwise_reload(self.model, self.model_config)
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
