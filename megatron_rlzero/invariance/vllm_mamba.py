"""The rollout engine's Mamba-2 mixer: vLLM's parameters and loaders, our operators, our states in its cache blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.v1.attention.backend import AttentionBackend

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.invariance.vllm_checks import Counted, Operator
from megatron_rlzero.invariance.vllm_step import Step, StepBuilder
from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.conv1d import causal_conv1d_cached
from megatron_rlzero.kernels.mamba import Cache, scan_cached_at
from megatron_rlzero.kernels.norm import gated_group_norm


class States(NamedTuple):
    """What a sequence leaves in its block; the order in memory, fp32 first, so that every state is aligned.

    Each is of the shape that it has on one worker, without the blocks. See kernels.mamba.Cache; ``conv`` holds the last
    inputs of the convolution.
    """

    state: Any
    dt: Any
    x: Any
    b: Any
    conv: Any


def shapes(config: VllmConfig) -> States:
    """Shapes of the states of one block of one worker."""
    hf, ranks = config.model_config.hf_text_config, config.parallel_config.tensor_parallel_size
    heads, groups, dim, n = hf.mamba_num_heads // ranks, hf.n_groups // ranks, hf.mamba_head_dim, hf.ssm_state_size
    return States(
        (heads, dim, n),
        (tiles.CHUNK, heads),
        (tiles.CHUNK, heads, dim),
        (tiles.CHUNK, groups, n),
        (hf.conv_kernel - 1, heads * dim + 2 * groups * n),
    )


def dtypes(config: VllmConfig) -> States:
    model = config.model_config.dtype
    return States(torch.float32, torch.float32, model, model, model)


class InvariantGatedNorm(Operator, Mixer2RMSNormGated):
    """The gate, then RMSNorm over groups, which lie whole on a rank."""

    def forward_native(self, x: Tensor, gate: Tensor) -> Tensor:
        self.used()
        groups = x.shape[-1] // self.group_size
        return gated_group_norm(x, gate, self.weight, groups, self.variance_epsilon)


class InvariantMambaBackend(AttentionBackend):
    """What vLLM asks about the layer's cache."""

    @staticmethod
    def get_name() -> str:
        """The entry of vLLM's registry in whose place it is."""
        return "MAMBA2_ATTN"

    @classmethod
    def is_ssm(cls) -> bool:
        """A state for a sequence, not for a token."""
        return True

    @staticmethod
    def get_impl_cls() -> type:
        """None: the layer itself."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """See AttentionBackend."""
        return StepBuilder


class InvariantMamba(Counted, MambaMixer2):
    """Prefill, chunks of it and decode by one arithmetic, over chunks at fixed positions of a sequence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        hf, ranks = read_config(config.model_config.model), get_tensor_model_parallel_world_size()
        if kwargs["n_groups"] % ranks:
            raise ValueError(
                f"kernels = aligned: rollout.tensor_model_parallel_size = {ranks} does not divide n_groups = "
                f"{kwargs['n_groups']}, and a group of the gated norm has to lie on one rank"
            )
        if config.cache_config.enable_prefix_caching:
            raise ValueError(
                "kernels = aligned: prefixes of a model with Mamba layers cannot be cached, since a state is kept at "
                "the last chunk boundary and not at the end of every block; leave enable_prefix_caching out"
            )
        self.dt_limit = architecture(hf).mixer(hf)["dt_limit"]
        self._shapes, self._dtypes = shapes(config), dtypes(config)
        for name in ("D", "dt_bias"):
            parameter = Parameter(torch.empty(self.num_heads // ranks, dtype=torch.float32))
            set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
            setattr(self, name, parameter)

    def get_state_shape(self) -> States:
        return self._shapes

    def get_state_dtype(self) -> States:
        return self._dtypes

    def get_attn_backend(self) -> type[InvariantMambaBackend]:
        """See MambaBase."""
        return InvariantMambaBackend

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        if mup_vector is not None:
            raise ValueError("kernels = aligned: the mixer's projections are not scaled")
        projected, _ = self.in_proj(hidden_states)
        gate, xbc, dt = projected.split((self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size), -1)
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory
            y = torch.zeros_like(gate)
        else:
            self.used()
            self.conv1d.used()
            y = self._scan(xbc, dt, *metadata[self.prefix].shared(_blocks))
        return self.out_proj(self.norm(y, gate))[0]

    def _scan(self, xbc: Tensor, dt: Tensor, bounds: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        cache = States(*self.kv_cache)
        weight = self.conv1d.weight[:, 0]
        xbc = causal_conv1d_cached(xbc, weight, self.conv1d.bias, bounds, positions, cache.conv, slots)
        x, b, c = (
            values.unflatten(-1, shape)
            for values, shape in zip(
                self.split_hidden_states_B_C_fn(xbc),
                (cache.x.shape[2:], cache.b.shape[2:], cache.b.shape[2:]),
                strict=True,
            )
        )
        states = Cache(cache.state, cache.x, cache.dt, cache.b, slots)
        y = scan_cached_at(x, dt, self.A, b, c, self.D, self.dt_bias, bounds, positions, states, self.dt_limit)
        return y.flatten(1)


def _blocks(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's new tokens begin; the position of its first one; its block, the only one that it has."""
    return step.bounds, step.lengths - step.bounds.diff(), step.block_table[:, 0].long()
