"""The learner's mixture of experts: Megatron's layer and dispatcher, our router, experts and order of combination."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_rlzero.invariance.megatron_layers import (
    DenseMLP,
    ReplicatedLinear,
    TransformerEngineState,
    activation,
    replicated,
    row_group,
)


class Router(TopKRouter):
    """Megatron's top-k router with our gate and choice; auxiliary losses stay Megatron's, off unless configured."""

    def __init__(self, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(config, **kwargs)
        replicated(config, self.weight)

    def gating(self, input: Tensor) -> Tensor:
        logits = self.config.operators.gate(input.flatten(0, -2), self.weight, row_group(self.config))
        return logits.reshape(*input.shape[:-1], -1)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities fp32 [tokens, E], zero where not chosen, and bool [tokens, E]."""
        sequence, batch = logits.shape[:2]
        logits, self._counting = logits.flatten(0, 1), torch.is_grad_enabled()
        padding = padding_mask.reshape(-1) if padding_mask is not None else None
        logits = self.apply_z_loss(logits, padding_mask=padding)
        probabilities, experts = self.config.operators.top_k(
            logits,
            self.topk,
            renormalise=not self.config.moe_router_pre_softmax,
            scaling=self.config.moe_router_topk_scaling_factor or 1.0,
            sigmoid=self.score_function == "sigmoid",
            bias=self.expert_bias,
            groups=self.config.moe_router_num_groups or 1,
            group_top_k=self.config.moe_router_group_topk or 1,
        )
        probs = torch.zeros_like(logits).scatter(1, experts, probabilities)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            chosen, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, padding_mask=padding
            )
            masked = padding is not None
            probs = self._apply_aux_loss(probs, scores, chosen, with_padding_mask=masked)
            probs = self._apply_seq_aux_loss(probs, scores, chosen, sequence, batch, with_padding_mask=masked)
            probs = self._apply_global_aux_loss(probs, scores, chosen, with_padding_mask=masked)
        self._apply_expert_bias(routing_map, padding)
        return probs, routing_map

    @torch.no_grad()
    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts the tokens of each expert for Megatron's update of the bias; once, not in a forward that is repeated.

        Megatron's own is compiled, and takes no mask of one number per token.
        """
        if self.enable_expert_bias and self._counting:
            real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real.sum(dim=0)


class GroupedLinear(TransformerEngineState):
    """One weight per local expert, named weight{k} as in TransformerEngine's grouped linear."""

    def __init__(self, experts: int, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        self.experts, self.product = experts, config.operators.grouped_linear
        for k in range(experts):
            shape = (output_size, input_size)
            weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
            # False always: the expert-data-parallel group reduces it, also where experts are not split.
            weight.allreduce = False
            setattr(self, f"weight{k}", weight)

    def forward(self, x: Tensor, rows: list[int]) -> Tensor:
        return self.product(x, [getattr(self, f"weight{k}") for k in range(self.experts)], rows)


class GroupedExperts(MegatronModule):
    """Experts on tokens sorted by expert. The routing probabilities are applied when outputs are combined."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: object) -> None:
        super().__init__(config)
        hidden, width = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        first = 2 * width if config.gated_linear_unit else width
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, first, config)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, hidden, config)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        rows = tokens_per_expert.tolist()
        return self.linear_fc2(activation(self.config)(self.linear_fc1(x, rows)), rows), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The entries of Megatron's TEGroupedMLP, so that distributed checkpoints of either load under the other.

        Experts are numbered in the whole model: along an axis after ``sharded_offsets``, or in the key under
        ``metadata["singleton_local_shards"]``.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        data_parallel, singleton = metadata["dp_cp_group"], metadata.get("singleton_local_shards", False)
        tensor_parallel = parallel_state.get_expert_tensor_parallel_group()
        local, ranks = self.linear_fc1.experts, parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * local
        entries: ShardedStateDict = {}
        for linear, axis in (("linear_fc1", 0), ("linear_fc2", 1)):
            for k in range(local):
                number = (len(sharded_offsets), first + k, ranks * local)
                offsets = tuple(sharded_offsets) if singleton else (*sharded_offsets, number)
                module = f"{prefix}experts.{first + k}.{linear}." if singleton else f"{prefix}experts.{linear}."
                state = {
                    "weight": getattr(getattr(self, linear), f"weight{k}"),
                    "_extra_state": torch.empty(0, dtype=torch.uint8),
                }
                shards = make_sharded_tensors_for_checkpoint(
                    state, module, {"weight": axis}, offsets, tp_group=tensor_parallel, dp_cp_group=data_parallel
                )
                for entry in shards.values():
                    entry.replica_id = (*entry.replica_id[:2], parallel_state.get_expert_data_parallel_rank())
                weight = shards[f"{module}weight"]
                if linear == "linear_fc1" and self.config.gated_linear_unit:
                    weight = apply_swiglu_sharded_factory(
                        weight, offsets, singleton, tp_group=tensor_parallel, dp_group=data_parallel
                    )
                entries[f"{prefix}{linear}.weight{k}"] = weight
                entries[f"{prefix}{linear}._extra_state{k or ''}"] = shards[f"{module}_extra_state"]
        return entries


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher; the token's owner combines its experts' outputs in ascending expert id.

    Rows and their gradients are moved by ``kernels.experts``: Megatron's gradient of a token has no order on a GPU.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of all experts, sorted by expert, then token, and their probabilities, which nobody reads."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        chosen = routing_map.T
        row = (chosen.flatten().cumsum(0) - 1).view(chosen.shape).T
        self.slots = row[routing_map].view(len(routing_map), self.config.moe_router_topk)
        rows = self.config.operators.permute(hidden_states.flatten(0, -2), self.slots)
        return rows, probs.detach().T[chosen]

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Each token's outputs, weighted and added."""
        outputs = self.config.operators.unpermute(permutated_local_input_tokens, self.slots)
        probabilities = self.probs[self.routing_map].view(self.slots.shape)
        return self.config.operators.combine(outputs, probabilities).view(self.hidden_shape)


class SharedExperts(SharedExpertMLP, DenseMLP):
    """Megatron's shared experts on our dense MLP."""


class MoE(MoELayer):
    """Megatron's mixture-of-experts layer with our dispatcher and latent projections."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        *args: object,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        # Megatron's constructor insists on TransformerEngine for latent projections; experts get the real config.
        plain = copy(config)
        plain.moe_latent_size = None
        experts = submodules.experts
        submodules = replace(submodules, experts=lambda count, _, **kw: experts(count, config, **kw))
        super().__init__(plain, submodules, *args, pg_collection=pg_collection, **kwargs)
        self.config = config
        if config.moe_latent_size:
            self.fc1_latent_proj = ReplicatedLinear(config.hidden_size, config.moe_latent_size, config)
            self.fc2_latent_proj = ReplicatedLinear(config.moe_latent_size, config.hidden_size, config)
        self.token_dispatcher = Dispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )
