"""The learner's modules: Megatron's own, with every value-producing operator taken from ``config.operators``.

They go in through Megatron's extension points: a BackendSpecProvider, ModuleSpecs for HybridModel, and subclasses that
keep the parameter names of TransformerEngine's spec, so that checkpoints of either load under the other.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table


def _replicated(config: TransformerConfig, weight: Parameter) -> Parameter:
    """Marks a weight that every tensor-parallel rank holds.

    Where each rank computes the whole gradient, Megatron averages equal ones: for a power of two of ranks that changes
    no bit. Otherwise it adds up the ranks' parts.
    """
    whole = config.operators.whole_gradients
    weight.sequence_parallel = config.sequence_parallel and not whole
    weight.average_gradients_across_tp_domain = whole
    return weight


def _ones(config: TransformerConfig, size: int) -> Parameter:
    weight = torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device())
    return _replicated(config, Parameter(weight))


def _row_group(config: TransformerConfig) -> ProcessGroup | None:
    """Ranks over which the tokens are split outside attention and MLP."""
    return parallel_state.get_tensor_model_parallel_group() if config.sequence_parallel else None


class Norm(Module):
    """RMSNorm over the last dimension of [tokens, batch, hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self.rows, self.rms_norm = eps, _row_group(config), config.operators.rms_norm
        self.weight = _ones(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, rows=self.rows)


class HeadNorm(Module):
    """RMSNorm over the head dimension of [tokens, batch, heads, dim]; the ranks hold different heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self.rms_norm = eps, config.operators.rms_norm
        self.heads = parallel_state.get_tensor_model_parallel_group()
        self.weight = _ones(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, heads=self.heads)


class ColumnLinear(ColumnParallelLinear):
    """Column-parallel linear: parameters and options are Megatron's, product and communication ours.

    ``stacked``: how many matrices lie one under the other in a rank's weight.
    """

    stacked = 1

    def _forward_impl(self, input, weight, *, bias, **_):
        slices, group = self.config.reduction_slices, self.tp_group
        y = self.config.operators.column_parallel(
            input.flatten(0, -2), weight, slices, group, self.sequence_parallel, self.stacked
        ).reshape(-1, *input.shape[1:-1], weight.shape[0])
        return y if bias is None else y + bias


class NormColumnLinear(ColumnLinear):
    """Norm, then column-parallel linear, under the parameter names of TransformerEngine's fused module."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.rows = _row_group(config)
        self.layer_norm_weight = _ones(config, input_size)

    def forward(self, input_, *args, **kwargs):
        rms_norm, eps = self.config.operators.rms_norm, self.config.layernorm_epsilon
        normed = rms_norm(input_, self.layer_norm_weight, eps, rows=self.rows)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets)


class NormGatedLinear(NormColumnLinear):
    """Norm, then the gate and up projections of a gated MLP."""

    stacked = 2


class RowLinear(RowParallelLinear):
    """Row-parallel linear: parameters and options are Megatron's, product and reduction ours."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.config.operators.row_parallel(
            input_.flatten(0, -2), self.weight, self.config.reduction_slices, self.tp_group, self.sequence_parallel
        ).reshape(-1, *input_.shape[1:-1], self.weight.shape[0])
        if self.bias is not None and not self.skip_bias_add:
            return y + self.bias, None
        return y, self.bias


@lru_cache
def _rotary(length: int, dim: int, base: float, device: torch.device) -> Tensor:
    return rotary_table(length, dim, base, device)


class CoreAttention(MegatronModule):
    """Causal attention over packed documents, with the rotary embedding inside: positions come from cu_seqlens."""

    def __init__(self, config: TransformerConfig, *, rope_theta: float | None, **_: object) -> None:
        super().__init__(config)
        self.rope_theta = rope_theta
        self.scale = config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv_heads, dim] -> [tokens, heads * dim]."""
        bounds = packed_seq_params.cu_seqlens_q
        lengths = bounds.diff()
        if self.rope_theta is not None:
            tokens = torch.arange(query.shape[0], device=query.device)
            positions = tokens - torch.repeat_interleave(bounds[:-1], lengths)
            # One table for all lengths: powers of two keep the number of tables small.
            length = 1 << max(int(packed_seq_params.max_seqlen_q) - 1, 1).bit_length()
            table = _rotary(length, query.shape[-1], self.rope_theta, query.device)
            query, key = (apply_rotary(x, table, positions) for x in (query, key))
        attention = self.config.operators.attention
        return attention(query, key, value, lengths.tolist(), self.scale).flatten(1)


class Router(TopKRouter):
    """Megatron's top-k router with our gate and choice; auxiliary losses stay Megatron's, off unless configured."""

    def __init__(self, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(config, **kwargs)
        _replicated(config, self.weight)

    def gating(self, input: Tensor) -> Tensor:
        logits = self.config.operators.gate(input.flatten(0, -2), self.weight, _row_group(self.config))
        return logits.reshape(*input.shape[:-1], -1)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities fp32 [tokens, E], zero where not chosen, and bool [tokens, E]."""
        sequence, batch = logits.shape[:2]
        logits = logits.flatten(0, 1)
        padding = padding_mask.reshape(-1) if padding_mask is not None else None
        logits = self.apply_z_loss(logits, padding_mask=padding)
        probabilities, experts = self.config.operators.top_k(
            logits,
            self.topk,
            renormalise=not self.config.moe_router_pre_softmax,
            scaling=self.config.moe_router_topk_scaling_factor or 1.0,
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
        self._apply_expert_bias(routing_map, padding_mask=padding)
        return probs, routing_map


class GroupedLinear(Module):
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
    """SwiGLU experts on tokens sorted by expert. The routing probabilities are applied when outputs are combined."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: object) -> None:
        super().__init__(config)
        width = config.moe_ffn_hidden_size
        self.linear_fc1 = GroupedLinear(num_local_experts, config.hidden_size, 2 * width, config)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, config.hidden_size, config)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        rows = tokens_per_expert.tolist()
        return self.linear_fc2(self.config.operators.silu_and_mul(self.linear_fc1(x, rows)), rows), None


class GatedMLP(MLP):
    """Megatron's dense MLP with our SwiGLU."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        return self.linear_fc2(self.config.operators.silu_and_mul(self.linear_fc1(hidden_states)[0]))


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher; the token's owner combines its experts' outputs in ascending expert id."""

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        outputs = permutated_local_input_tokens
        # Rows lie sorted by expert, then token: row of (token, expert) counts the chosen pairs before it.
        chosen = self.routing_map.T
        row = (chosen.flatten().cumsum(0) - 1).view(chosen.shape).T
        tokens = self.routing_map.shape[0]
        slots = row[self.routing_map].view(tokens, self.config.moe_router_topk)
        probabilities = self.probs[self.routing_map].view(slots.shape)
        return self.config.operators.combine(outputs[slots], probabilities).view(self.hidden_shape)


class MoE(MoELayer):
    """Megatron's mixture-of-experts layer with our dispatcher."""

    def __init__(self, *args: object, pg_collection=None, **kwargs: object) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = Dispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )


class LogProbOutput(ColumnLinear):
    """The output layer: log-probability and entropy of the targets it was given, never the logits."""

    targets: Tensor
    real_vocab_size: int
    temperature: float

    def forward(self, input_, weight=None, runtime_gather_output=None):
        """hidden [tokens (/ tp), 1, H] -> fp32 [tokens, 1, 2]: log-probability, entropy."""
        pair = self.config.operators.log_prob(
            input_[:, 0],
            self.weight if weight is None else weight,
            self.targets,
            self.real_vocab_size,
            self.temperature,
            self.config.reduction_slices,
            self.tp_group,
            self.sequence_parallel,
        )
        return torch.stack(pair, dim=-1)[:, None], None


class Stack(HybridStack):
    """HybridStack whose final norm is ours; Megatron's constructor names TransformerEngine's."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)


class PolicyModel(HybridModel):
    """HybridModel that returns the log-probabilities of target tokens.

    Args:
        vocab_size: of the checkpoint; ids from there up to the padded size are outside the softmax.
        padded_vocab_size: rows of the embedding over all tensor-parallel ranks.
        temperature: divides the logits.
    """

    def __init__(self, *args, vocab_size: int, padded_vocab_size: int, temperature: float, **kwargs) -> None:
        super().__init__(*args, vocab_size=padded_vocab_size, parallel_output=True, **kwargs)
        if self.post_process:
            # The class of the output layer is not part of the spec.
            self.output_layer.__class__ = LogProbOutput
            self.output_layer.real_vocab_size = vocab_size
            self.output_layer.temperature = temperature

    def forward(
        self, tokens: Tensor, targets: Tensor, packed: PackedSeqParams, padding_mask: Tensor | None = None
    ) -> Tensor:
        """int64 [1, tokens] each -> fp32 [1, tokens, 2] on the last stage, hidden states before it.

        ``targets[i]`` is the token whose log-probability position i gives; the caller shifts.
        """
        if self.post_process:
            self.output_layer.targets = targets[0]
        return super().forward(
            tokens, position_ids=None, attention_mask=None, packed_seq_params=packed, padding_mask=padding_mask
        )


class InvariantSpecProvider(BackendSpecProvider):
    """The backend whose modules are made from ``kernels``."""

    def column_parallel_linear(self) -> type:
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        return RowLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return HeadNorm if for_qk else Norm

    def core_attention(self) -> type:
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type:
        return GroupedExperts

    def activation_func(self) -> None:
        return None


def hybrid_stack_spec(rope_theta: float | None, backend: BackendSpecProvider | None = None) -> ModuleSpec:
    """Spec for HybridModel with attention (``*``), MLP (``-``) and mixture-of-experts (``E``) layers.

    Args:
        rope_theta: base of the rotary embedding, or None for attention without positions.
    """
    backend = backend or InvariantSpecProvider()
    norm = backend.layer_norm(rms_norm=True)
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_layer_norm_linear(),
                    core_attention=partial(backend.core_attention(), rope_theta=rope_theta),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=backend.layer_norm(for_qk=True),
                    k_layernorm=backend.layer_norm(for_qk=True),
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    moe_layer = ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=partial(MoE, submodules=MoESubmodules(experts=backend.grouped_mlp_modules(True), router=Router)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=partial(
                GatedMLP.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=NormGatedLinear, linear_fc2=backend.row_parallel_linear()),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return ModuleSpec(
        module=Stack,
        submodules=HybridStackSubmodules(attention_layer=attention_layer, mlp_layer=mlp_layer, moe_layer=moe_layer),
    )
