"""The learner's Mamba-2 mixer: parameters, shapes and checkpoint entries of Megatron's MambaMixer, our operators."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter


class GatedNorm(Module):
    """The scan's output, gated, then RMSNorm over groups; ranks hold whole groups."""

    def __init__(self, config: TransformerConfig, width: int, groups: int, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.config, self.groups, self.tp_group = config, groups, tp_group
        self.weight = _sharded(torch.empty(width, dtype=config.params_dtype, device=torch.cuda.current_device()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[tokens, width] each."""
        norm = self.config.operators.gated_group_norm
        return norm(x, gate, self.weight, self.groups, self.config.layernorm_epsilon)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class Mixer(MegatronModule):
    """Mamba-2 (Dao and Gu, Transformers are SSMs, 2024): projection, causal convolution, scan, gated norm, projection.

    Tensor parallelism splits heads and groups. A_log, D and dt_bias are fp32 whatever the model's dtype.

    Args:
        submodules: classes of in_proj, which holds the layer's norm, and out_proj.
        d_conv: width of the convolution.
        dt_limit: bounds of the time step after softplus.

    Raises:
        ValueError: heads or groups do not divide over the tensor-parallel ranks.
    """

    sharded_state_dict = MambaMixer.sharded_state_dict

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        dt_limit: Sequence[float] = (0.0, inf),
        *,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.dt_limit = pg_collection.tp, tuple(dt_limit)
        self.d_state, self.headdim = config.mamba_state_dim, config.mamba_head_dim
        self.nheads_local_tp = _local("mamba_num_heads", config, self.tp_group)
        self.ngroups_local_tp = _local("mamba_num_groups", config, self.tp_group)
        self.d_inner_local_tp = self.nheads_local_tp * self.headdim
        inner, state, heads = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state, self.nheads_local_tp
        self.blocks = (inner, inner, state, state, heads)  # z, x, B, C, dt
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(self.blocks) * self.tp_group.size(),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.in_proj.blocks = self.in_proj.weight.partition_sizes = self.blocks
        device = torch.cuda.current_device()
        channels = inner + 2 * state
        self.conv1d_weight = _sharded(torch.empty(channels, 1, d_conv, dtype=config.params_dtype, device=device))
        self.conv1d_bias = _sharded(torch.empty(channels, dtype=config.params_dtype, device=device))
        self.conv1d_weight.partition_sizes = self.conv1d_bias.partition_sizes = self.blocks[1:4]
        self.dt_bias, self.A_log, self.D = (_sharded(torch.empty(heads, device=device), fp32=True) for _ in range(3))
        self.norm = GatedNorm(config, inner, self.ngroups_local_tp, self.tp_group)
        self.out_proj = build_module(
            submodules.out_proj,
            config.mamba_num_heads * self.headdim,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def forward(
        self, hidden_states: Tensor, inference_context: None = None, *, packed_seq_params: PackedSeqParams, **_: object
    ) -> tuple[Tensor, None]:
        """[tokens (/ tp), 1, hidden], documents as packed_seq_params says -> the same shape."""
        operators, lengths = self.config.operators, packed_seq_params.cu_seqlens_q.diff().tolist()
        inner, _, state, _, heads = self.blocks
        z, xbc, dt = self.in_proj(hidden_states)[0][:, 0].split((inner, inner + 2 * state, heads), -1)
        xbc = operators.causal_conv1d(xbc, self.conv1d_weight[:, 0], self.conv1d_bias, lengths)
        x, b, c = xbc.split((inner, state, state), -1)
        y = operators.scan(
            x.unflatten(-1, (heads, -1)),
            dt,
            -self.A_log.exp(),
            *(part.unflatten(-1, (self.ngroups_local_tp, -1)) for part in (b, c)),
            self.D,
            self.dt_bias,
            lengths,
            self.dt_limit,
        )
        return self.out_proj(self.norm(y.flatten(1), z)[:, None])


def _local(count: str, config: TransformerConfig, group: ProcessGroup) -> int:
    whole, ranks = getattr(config, count), group.size()
    if whole % ranks:
        raise ValueError(f"tensor_model_parallel_size = {ranks} does not divide {count} = {whole}")
    return whole // ranks


def _sharded(data: Tensor, fp32: bool = False) -> Parameter:
    """Marks a parameter that tensor parallelism splits along dimension 0."""
    parameter = Parameter(data)
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.keep_fp32 = True, 0, fp32
    return parameter
