"""The learner's model: Megatron's HybridModel, built from our layers through its extension points.

A BackendSpecProvider and ModuleSpecs name the layers; HybridModel's two hard-coded classes, final norm and output
layer, are replaced in subclasses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megatron_rlzero.invariance.megatron_layers import (
    ColumnLinear,
    CoreAttention,
    DenseMLP,
    HeadNorm,
    Norm,
    NormColumnLinear,
    RowLinear,
)
from megatron_rlzero.invariance.megatron_mamba import Mixer
from megatron_rlzero.invariance.megatron_moe import GroupedExperts, MoE, Router, SharedExperts


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
        if padding_mask is not None and self.config.sequence_parallel:
            group = self.pg_collection.tp
            # GPTModel hands each rank its part, HybridModel does not.
            padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
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


def hybrid_stack_spec(
    rotary: dict[str, Any] | None,
    qk_norm: bool,
    mamba: dict[str, Any] | None = None,
    backend: BackendSpecProvider | None = None,
) -> ModuleSpec:
    """Spec for HybridModel with Mamba (``M``), attention (``*``), MLP (``-``) and mixture-of-experts (``E``) layers.

    Args:
        rotary: arguments of rotary_table that describe the rotary embedding, or None for attention without positions.
        qk_norm: whether query and key heads are normed, as TransformerConfig.qk_layernorm says.
        mamba: arguments of Mixer beside those that TransformerConfig has.
    """
    backend = backend or InvariantSpecProvider()
    mamba_layer = ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            mixer=ModuleSpec(
                module=Mixer,
                params=mamba or {},
                submodules=MambaMixerSubmodules(
                    in_proj=backend.column_parallel_layer_norm_linear(), out_proj=backend.row_parallel_linear()
                ),
            ),
            mamba_bda=get_bias_dropout_add,
        ),
    )
    norm = backend.layer_norm(rms_norm=True)
    head_norm = backend.layer_norm(for_qk=True) if qk_norm else None
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_layer_norm_linear(),
                    core_attention=partial(backend.core_attention(), rotary=rotary),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    moe_layer = ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=partial(
                MoE,
                submodules=MoESubmodules(
                    experts=backend.grouped_mlp_modules(True),
                    shared_experts=partial(
                        SharedExperts,
                        submodules=MLPSubmodules(
                            linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear()
                        ),
                    ),
                    router=Router,
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            mlp=partial(
                DenseMLP.as_mlp_submodule,
                submodules=MLPSubmodules(
                    linear_fc1=backend.column_parallel_layer_norm_linear(), linear_fc2=backend.row_parallel_linear()
                ),
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return ModuleSpec(
        module=Stack,
        submodules=HybridStackSubmodules(
            mamba_layer=mamba_layer, attention_layer=attention_layer, mlp_layer=mlp_layer, moe_layer=moe_layer
        ),
    )
