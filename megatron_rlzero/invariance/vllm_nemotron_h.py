"""The rollout engine's Nemotron-H: vLLM's model with our states, and with experts that run on every platform."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.nemotron_h import (
    ALL_DECODER_LAYER_TYPES,
    NemotronHForCausalLM,
    NemotronHMLP,
    NemotronHModel,
    NemotronHMoEDecoderLayer,
)
from vllm.model_executor.models.utils import maybe_prefix

from megatron_rlzero.invariance import vllm_mamba
from megatron_rlzero.invariance.vllm_checks import Counted
from megatron_rlzero.invariance.vllm_layers import routed
from megatron_rlzero.kernels.router import top_k


class Router(Counted, nn.Module):
    """Sigmoid scores, the choice by scores and bias among the best groups."""

    def __init__(self, config: Any, bias: Parameter) -> None:
        super().__init__()
        self.arguments = (config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor, True)
        self.groups = (config.n_group, config.topk_group)
        self.bias = [bias]  # the gate's parameter, listed there alone

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fp32 [tokens, E] -> the logits, expert ids [tokens, k] and their weights fp32 [tokens, k]."""
        self.used()
        weights, experts = top_k(logits, *self.arguments, self.bias[0], *self.groups)
        return logits, experts, weights


class Experts(Counted, nn.Module):
    """Squared-ReLU experts, whole, spread over the tensor-parallel workers as ``layouts.engine_layout`` says."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        each, left = divmod(count, ranks)
        first, mine = rank * each + min(rank, left), each + (rank < left)
        self.w13_weight = Parameter(torch.empty(mine, width, hidden))
        self.w2_weight = Parameter(torch.empty(mine, hidden, width))
        local = torch.full((count,), -1)
        local[first : first + mine] = torch.arange(mine)
        self.register_buffer("_expert_map", local, persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Names are N.up_proj.weight and N.down_proj.weight; those of other workers' experts are passed over."""
        targets = {"up_proj.weight": "w13_weight", "down_proj.weight": "w2_weight"}
        for name, weight in weights:
            number, _, kind = name.partition(".")
            if (local := int(self._expert_map[int(number)])) >= 0:
                getattr(self, targets[kind]).data[local].copy_(weight)
        return set(targets.values())

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], int64 [tokens, k], fp32 [tokens, k] -> [tokens, hidden]."""
        self.used()
        return routed(x, experts, weights, self.w13_weight, self.w2_weight, self._expert_map, gated=False)


class MoE(nn.Module):
    """Routed experts, between latent projections if there are any, and shared experts."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, latent, count = config.hidden_size, config.moe_latent_size, config.n_routed_experts
        self.gate = GateLinear(hidden, count, out_dtype=torch.float32, prefix=f"{prefix}.gate")
        self.gate.e_score_correction_bias = Parameter(torch.empty(count, dtype=torch.float32))
        self.router = Router(config, self.gate.e_score_correction_bias)
        self.experts = Experts(count, latent or hidden, config.moe_intermediate_size)
        self.shared_experts = NemotronHMLP(
            config,
            hidden,
            config.moe_shared_expert_intermediate_size,
            quant_config,
            prefix=f"{prefix}.shared_experts",
        )
        self.latent = latent is not None
        if self.latent:
            self.fc1_latent_proj = ReplicatedLinear(hidden, latent, bias=False, prefix=f"{prefix}.fc1_latent_proj")
            self.fc2_latent_proj = ReplicatedLinear(latent, hidden, bias=False, prefix=f"{prefix}.fc2_latent_proj")

    def forward(self, x: Tensor) -> Tensor:
        _, experts, weights = self.router(self.gate(x)[0])
        if not self.latent:
            return self.experts(x, experts, weights) + self.shared_experts(x)
        routed = self.experts(self.fc1_latent_proj(x)[0], experts, weights)
        return self.fc2_latent_proj(routed)[0] + self.shared_experts(x)


class MoELayer(NemotronHMoEDecoderLayer):
    """vLLM's layer around our experts."""

    def __init__(self, config: Any, layer_idx: int, quant_config: Any = None, prefix: str = "", **_: Any) -> None:
        nn.Module.__init__(self)
        self.mixer = MoE(config, quant_config, f"{prefix}.mixer")
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)


class InvariantNemotronH(NemotronHForCausalLM):
    """vLLM's model; its constructor is not called, since it builds experts for GPUs."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = config = vllm_config.model_config.hf_config
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.quant_config = vllm_config.quant_config
        layers = ALL_DECODER_LAYER_TYPES | {"E": MoELayer}
        self.model = NemotronHModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), decoder_layer_types=layers
        )
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> vllm_mamba.States:
        return vllm_mamba.shapes(vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> vllm_mamba.States:
        return vllm_mamba.dtypes(vllm_config)
