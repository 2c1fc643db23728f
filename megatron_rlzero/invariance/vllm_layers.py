"""The rollout engine's layers: vLLM's own, with every value-producing operator taken from ``kernels``.

They go in through vLLM's out-of-tree registries, so that its model classes, weight loaders and parameter names stay.
``install`` is called once in every process of a server, before a model is built.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.activation import ReLUSquaredActivation, SiluAndMul
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.sampler import Sampler

from megatron_rlzero.architectures import families
from megatron_rlzero.invariance import vllm_checks
from megatron_rlzero.invariance.vllm_checks import Counted, Operator, check_used
from megatron_rlzero.invariance.vllm_mamba import InvariantGatedNorm, InvariantMamba
from megatron_rlzero.kernels import libraries
from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.experts import combine, mlp
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.log_prob import log_softmax
from megatron_rlzero.kernels.norm import rms_norm
from megatron_rlzero.kernels.reduction import sliced_product, tree
from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table
from megatron_rlzero.kernels.router import gate, top_k

ATTENTION = "megatron_rlzero.invariance.vllm_attention.InvariantAttentionBackend"
#: set by ``install``: slices of every sum that tensor parallelism splits, and the temperature
_slices = 4
_temperature = 1.0


def _linear_of(base: type[LinearBase]) -> type[LinearBase]:
    """A linear layer of vLLM that is not reduced over ranks, computing with our operator."""

    class Ours(Counted, base):
        _cpu_skip_gemm_dispatch = True  # else the CPU kernel packs the weight away

        def forward(self, input_: Tensor) -> Any:
            self.used()
            if getattr(self, "gather_output", False) and self.tp_size > 1:
                raise NotImplementedError(f"kernels = aligned: {self.prefix} gathers its output over the ranks")
            y = linear(input_, self.weight, None if self.skip_bias_add else self.bias)
            return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y

    Ours.__name__ = f"Invariant{base.__name__}"
    return Ours


class InvariantRowParallelLinear(Counted, RowParallelLinear):
    """Row-parallel linear; the sum over K has the order of kernels/reduction under every tensor-parallel size."""

    _cpu_skip_gemm_dispatch = True

    def forward(self, input_: Tensor) -> Any:
        self.used()
        if not (self.input_is_parallel and self.reduce_results):
            raise NotImplementedError(f"kernels = aligned: {self.prefix} leaves its input or sum to others")
        root = sliced_product(input_.flatten(0, -2), self.weight.T, _slices // self.tp_size)
        if self.tp_size > 1:
            # all_gather concatenates the ranks' roots in rank order.
            root = tree(get_tp_group().all_gather(root[None], dim=0))
        y = root.to(input_.dtype).reshape(*input_.shape[:-1], -1)
        if self.bias is not None and not self.skip_bias_add:
            y = y + self.bias
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


class InvariantGateLinear(Counted, GateLinear):
    """The router's gate: fp32 logits."""

    _cpu_skip_gemm_dispatch = True

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        self.used()
        return gate(x, self.weight), None


class InvariantRMSNorm(Operator, RMSNorm):
    """Adds the residual first, rounded to the model's dtype, then the norm."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        self.used()
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        residual = x + residual
        return rms_norm(residual, self.weight, self.variance_epsilon), residual


class _Rotary(Operator):
    """The rotary table comes from float64 and stays fp32."""

    def __init__(
        self, head_size: int, rotary_dim: int, length: int, base: float, neox: bool, dtype: Any, *scaling: float
    ) -> None:
        if not neox or rotary_dim != head_size:
            raise ValueError("kernels = aligned: the rotary embedding has to rotate the halves of whole heads")
        self.scaling = tuple(map(float, scaling)) or None
        super().__init__(head_size, rotary_dim, length, base, neox, torch.float32, *scaling)

    def _compute_cos_sin_cache(self) -> Tensor:
        return rotary_table(self.max_position_embeddings, self.rotary_dim, self.base, scaling=self.scaling)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        self.used()
        return tuple(
            apply_rotary(x.unflatten(-1, (-1, self.head_size)), self.cos_sin_cache, positions).flatten(-2)
            for x in (query, key)
        )


class InvariantRotaryEmbedding(_Rotary, RotaryEmbedding):
    """Frequencies as they are."""


class InvariantLlama3RotaryEmbedding(_Rotary, Llama3RotaryEmbedding):
    """Frequencies scaled as Llama 3.1 does."""


class InvariantSiluAndMul(Operator, SiluAndMul):
    """SwiGLU's activation."""

    def forward_native(self, x: Tensor) -> Tensor:
        self.used()
        return silu_and_mul(x)


class InvariantSquaredReLU(Operator, ReLUSquaredActivation):
    """The activation of an MLP without a gate."""

    def forward_native(self, x: Tensor) -> Tensor:
        self.used()
        return squared_relu(x)


class _AlreadyReduced:
    """In the place of vLLM's expert kernel: tells the runner that the output needs no all-reduce."""

    is_monolithic = True
    fused_experts = SimpleNamespace(consumes_expert_mask=False)

    @staticmethod
    def output_is_reduced() -> bool:
        return True


class InvariantMoEMethod(Operator, UnquantizedFusedMoEMethod):
    """SwiGLU experts; each token's outputs are combined in ascending expert id, whoever computed them."""

    is_monolithic = True

    def __init__(self, moe: Any) -> None:
        # not its parent's, which chooses a kernel by platform and dtype, and sizes that this kernel wants padded
        FusedMoEMethodBase.__init__(self, moe)
        self.unquantized_backend, self.supports_pre_processed_weights = UnquantizedMoeBackend.OOT, False
        self.wait()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        plain = layer.scoring_func == "softmax" and layer.routed_scaling_factor == 1.0 and not layer.use_grouped_topk
        if not plain or layer.e_score_correction_bias is not None or layer.activation.value != "silu":
            raise NotImplementedError(f"kernels = aligned: {layer.layer_name} routes or activates in another way")
        self.moe_kernel = _AlreadyReduced()

    def apply_monolithic(
        self, layer: torch.nn.Module, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        self.used()
        probabilities, experts = top_k(router_logits, self.moe.experts_per_token, layer.renormalize)
        return routed(x, experts, probabilities, layer.w13_weight, layer.w2_weight, layer.expert_map)


def routed(
    x: Tensor,
    experts: Tensor,
    probabilities: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_map: Tensor | None,
    gated: bool = True,
) -> Tensor:
    """Each token through its experts, combined in ascending expert id, whoever computed them.

    Args:
        x: [tokens, hidden].
        experts, probabilities: int64 and fp32 [tokens, k], as ``top_k`` gives them.
        w13, w2, gated: as in ``mlp``, of this worker's experts.
        expert_map: [E], an expert's number on this worker, -1 for another worker's; None where all are here.

    Returns:
        [tokens, hidden], on every worker.
    """
    outputs = mlp(x, experts if expert_map is None else expert_map[experts].long(), w13, w2, gated)
    if expert_map is not None:
        outputs = tensor_model_parallel_all_reduce(outputs)  # exact: one rank has each row, the others zeros
    return combine(outputs, probabilities)


class _EmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: vLLM's own packs a second copy of the weight for its products, whose release can crash at exit."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.used()
        return linear(x, layer.weight, bias)


class InvariantEmbedding(VocabParallelEmbedding):
    """The lookup."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quant_method = _EmbeddingMethod()


class InvariantLMHead(Counted, ParallelLMHead):
    """The output layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quant_method = _EmbeddingMethod()


def _compute_logprobs(logits: Tensor) -> Tensor:
    check_used()
    return log_softmax(logits, _temperature)


def install(slices: int, temperature: float) -> None:
    """Registers everything; vLLM then builds our classes where a model names its own.

    Args:
        slices: ``reduction_slices`` of the configuration.
        temperature: divides the logits.
    """
    global _slices, _temperature
    if current_platform.is_cpu():
        os.environ.update(libraries.settings())
        attention = AttentionBackendEnum.CPU_ATTN
    elif current_platform.is_cuda():
        attention = AttentionBackendEnum.CUSTOM
    else:
        raise RuntimeError(
            f"kernels = aligned: there are operators for CPUs and for NVIDIA's GPUs, and vLLM's platform is "
            f"{current_platform.device_name}; kernels = stock runs there"
        )
    _slices, _temperature = slices, temperature
    for base in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear):
        PluggableLayer.register_oot(_linear_of(base), name=base.__name__)
    PluggableLayer.register_oot(InvariantRowParallelLinear, name="RowParallelLinear")
    PluggableLayer.register_oot(InvariantGateLinear, name="GateLinear")
    PluggableLayer.register_oot(InvariantEmbedding, name="VocabParallelEmbedding")
    PluggableLayer.register_oot(InvariantLMHead, name="ParallelLMHead")
    PluggableLayer.register_oot(InvariantMamba, name="MambaMixer2")
    for ours, name in (
        (InvariantRMSNorm, "RMSNorm"),
        (InvariantRotaryEmbedding, "RotaryEmbedding"),
        (InvariantLlama3RotaryEmbedding, "Llama3RotaryEmbedding"),
        (InvariantSiluAndMul, "SiluAndMul"),
        (InvariantSquaredReLU, "ReLUSquaredActivation"),
        (InvariantGatedNorm, "Mixer2RMSNormGated"),
        (InvariantMoEMethod, "UnquantizedFusedMoEMethod"),
    ):
        CustomOp.register_oot(ours, name=name)
    for family in families():
        for name, model in family.engine_models().items():
            ModelRegistry.register_model(name, model)
    register_backend(attention, ATTENTION)
    Sampler.compute_logprobs = staticmethod(_compute_logprobs)
    vllm_checks.install()
