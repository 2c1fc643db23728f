"""The rollout engine's Mamba-2 mixer: vLLM's parameters and loaders, our operators, our states in its cache blocks."""

from __future__ import annotations

from dataclasses import dataclass
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

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.invariance.vllm_checks import Counted
from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.conv1d import causal_conv1d, conv_state
from megatron_rlzero.kernels.mamba import Cache, scan_cached
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


class InvariantGatedNorm(Counted, Mixer2RMSNormGated):
    """The gate, then RMSNorm over groups, which lie whole on a rank."""

    def forward_native(self, x: Tensor, gate: Tensor) -> Tensor:
        self.used()
        groups = x.shape[-1] // self.group_size
        return gated_group_norm(x, gate, self.weight, groups, self.variance_epsilon)

    forward_cpu = forward_native


@dataclass(frozen=True)
class _Part:
    """Sequences that are computed together: those with one new token, or the others.

    Attributes:
        tokens: their rows among the new tokens.
        started: bool [sequences, 1, 1], whether a sequence has earlier tokens.
    """

    tokens: slice
    lengths: list[int]
    starts: list[int]
    slots: Tensor
    started: Tensor


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

    def forward(self, hidden_states: Tensor, mup_vector: Tensor | None = None) -> Tensor:
        if mup_vector is not None:
            raise ValueError("kernels = aligned: the mixer's projections are not scaled")
        inner, channels, heads = self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size
        projected, _ = self.in_proj(hidden_states)
        gate, xbc, dt = projected.split((inner, channels, heads), -1)
        y = hidden_states.new_zeros(len(projected), inner)
        metadata = get_forward_context().attn_metadata
        if metadata is not None:  # else vLLM measures memory
            self.used()
            self.conv1d.used()
            for part in _parts(metadata[self.prefix]):
                y[part.tokens] = self._scan(xbc[part.tokens], dt[part.tokens], part)
        return self.out_proj(self.norm(y, gate))[0]

    def _scan(self, xbc: Tensor, dt: Tensor, part: _Part) -> Tensor:
        cache = States(*self.kv_cache)
        past = torch.where(part.started, cache.conv[part.slots], 0)
        cache.conv[part.slots] = conv_state(xbc, part.lengths, past)
        xbc = causal_conv1d(xbc, self.conv1d.weight[:, 0], self.conv1d.bias, part.lengths, past)
        x, b, c = (
            values.unflatten(-1, shape)
            for values, shape in zip(
                self.split_hidden_states_B_C_fn(xbc),
                (cache.x.shape[2:], cache.b.shape[2:], cache.b.shape[2:]),
                strict=True,
            )
        )
        states = Cache(cache.state, cache.x, cache.dt, cache.b, part.slots)
        y = scan_cached(x, dt, self.A, b, c, self.D, self.dt_bias, part.lengths, part.starts, states, self.dt_limit)
        return y.flatten(1)


def _parts(metadata: Any) -> list[_Part]:
    """vLLM puts sequences with one new token and a past first; the same for every layer of a step."""
    if not hasattr(metadata, "parts"):
        decodes, tokens = metadata.num_decodes, metadata.num_decode_tokens
        totals = metadata.seq_lens.tolist()
        parts = []
        if decodes:
            if tokens != decodes:
                raise RuntimeError("kernels = aligned: speculative decoding is not supported")
            parts.append(_part(slice(0, tokens), [1] * decodes, totals[:decodes], metadata.state_indices_tensor_d))
        if metadata.num_prefills:
            lengths = metadata.query_start_loc_p.diff().tolist()
            rows = slice(tokens, tokens + sum(lengths))
            parts.append(
                _part(rows, lengths, totals[decodes : decodes + len(lengths)], metadata.state_indices_tensor_p)
            )
        metadata.parts = parts
    return metadata.parts


def _part(tokens: slice, lengths: list[int], totals: list[int], slots: Tensor) -> _Part:
    starts = [total - length for total, length in zip(totals, lengths, strict=True)]
    started = torch.tensor([start > 0 for start in starts], device=slots.device)[:, None, None]
    return _Part(tokens, lengths, starts, slots.reshape(len(lengths), -1)[:, 0].long(), started)
