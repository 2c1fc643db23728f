"""The learner's dense layers: Megatron's own, with every value-producing operator taken from ``config.operators``.

Norms, linear layers, attention and MLP keep the parameter names of TransformerEngine's spec, so that checkpoints
of either load under the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table


def replicated(config: TransformerConfig, weight: Parameter) -> Parameter:
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
    return replicated(config, Parameter(weight))


def row_group(config: TransformerConfig) -> ProcessGroup | None:
    """Ranks over which the tokens are split outside attention and MLP."""
    return parallel_state.get_tensor_model_parallel_group() if config.sequence_parallel else None


class TransformerEngineState(Module):
    """The state that a module of TransformerEngine keeps beside its parameters, for fp8: empty here, and read over.

    So a checkpoint or a state dict of either loads under the other, and the two can stand in one spec.
    """

    def get_extra_state(self) -> Tensor:
        """uint8 [0], as TransformerEngine's modules without fp8 have it."""
        return torch.empty(0, dtype=torch.uint8)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: object) -> None:
        for name in [n for n in state_dict if n.startswith(f"{prefix}_extra_state")]:
            del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *args)


class Norm(TransformerEngineState):
    """RMSNorm over the last dimension of [tokens, batch, hidden]."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps, self.rows, self.rms_norm = eps, row_group(config), config.operators.rms_norm
        self.weight = _ones(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps, rows=self.rows)


class HeadNorm(TransformerEngineState):
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

    ``blocks``: rows of the matrices that lie one under the other in a rank's weight, see ``sliced_product``.
    """

    blocks: tuple[int, ...] = ()

    def _forward_impl(self, input, weight, *, bias, **_):
        slices, group = self.config.reduction_slices, self.tp_group
        return self.config.operators.column_parallel(
            input.flatten(0, -2), weight, slices, group, self.sequence_parallel, self.blocks, bias
        ).reshape(-1, *input.shape[1:-1], weight.shape[0])


class NormColumnLinear(ColumnLinear):
    """Norm, then column-parallel linear, under the parameter names of TransformerEngine's fused module."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.rows = row_group(config)
        self.layer_norm_weight = _ones(config, input_size)

    def forward(self, input_, *args, **kwargs):
        rms_norm, eps = self.config.operators.rms_norm, self.config.layernorm_epsilon
        normed = rms_norm(input_, self.layer_norm_weight, eps, rows=self.rows)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets)


class ReplicatedLinear(TransformerEngineState):
    """Linear with the whole weight on every tensor-parallel rank."""

    def __init__(self, input_size: int, output_size: int, config: TransformerConfig) -> None:
        super().__init__()
        self.rows, self.product = row_group(config), config.operators.replicated
        weight = torch.empty((output_size, input_size), dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = replicated(config, Parameter(weight))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = self.product(x.flatten(0, -2), self.weight, self.rows)
        return y.reshape(*x.shape[:-1], -1), None


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
def _rotary(length: int, dim: int, device: torch.device, **rotary: Any) -> Tensor:
    return rotary_table(length, dim, device=device, **rotary)


class CoreAttention(TransformerEngineState, MegatronModule):
    """Causal attention over packed documents, with the rotary embedding inside: positions come from cu_seqlens."""

    def __init__(self, config: TransformerConfig, *, rotary: dict[str, Any] | None, **_: object) -> None:
        super().__init__(config)
        self.rotary = rotary
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
        if self.rotary is not None:
            tokens = torch.arange(query.shape[0], device=query.device)
            positions = tokens - torch.repeat_interleave(bounds[:-1], lengths)
            # One table for all lengths: powers of two keep the number of tables small.
            length = 1 << max(int(packed_seq_params.max_seqlen_q) - 1, 1).bit_length()
            table = _rotary(length, query.shape[-1], query.device, **self.rotary)
            query, key = (apply_rotary(x, table, positions) for x in (query, key))
        attention = self.config.operators.attention
        return attention(query, key, value, lengths.tolist(), self.scale).flatten(1)


class DenseMLP(MLP):
    """Megatron's dense MLP with our activation."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        if config.gated_linear_unit:  # gate above up
            self.linear_fc1.blocks = (len(self.linear_fc1.weight) // 2,) * 2

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **_: object) -> tuple[Tensor, Tensor | None]:
        return self.linear_fc2(activation(self.config)(self.linear_fc1(hidden_states)[0]))


def activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """SwiGLU's in gated MLPs, else squared ReLU."""
    return config.operators.silu_and_mul if config.gated_linear_unit else config.operators.squared_relu
