"""Calls of every operator at the sizes of the two published models, on tensors without memory; see aot.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.attention import attention, paged_attention
from megatron_rlzero.kernels.attention.triton import device_plan
from megatron_rlzero.kernels.conv1d import causal_conv1d, causal_conv1d_cached
from megatron_rlzero.kernels.experts import combine, grouped_linear, mlp
from megatron_rlzero.kernels.linear import linear, row_parallel
from megatron_rlzero.kernels.log_prob import log_prob, log_softmax
from megatron_rlzero.kernels.mamba import Cache, scan, scan_cached_at
from megatron_rlzero.kernels.norm import gated_group_norm, rms_norm
from megatron_rlzero.kernels.rotary import apply_rotary
from megatron_rlzero.kernels.router import gate, top_k
from megatron_rlzero.kernels.tiles import CHUNK, KEYS
from tools.published import Sizes

#: Qwen3-30B-A3B; Nemotron-3-Nano has the gated norm, the squared ReLU and the sigmoid router (facts: their config.json)
TOKENS, QWEN = 512, Sizes("Qwen3-30B-A3B")
HIDDEN, HEADS, DIM, VOCABULARY = QWEN.hidden, QWEN.heads, QWEN.dim, QWEN.vocabulary
EXPERTS, TOP, WIDTH = QWEN.experts, QWEN.k, QWEN.width
FP32, INT64, INT32 = torch.float32, torch.int64, torch.int32


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of every operator that learner or engine use, gradients included."""

    def x(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    def both(f: Callable[..., Any], *inputs: Tensor) -> Callable[[], None]:
        def run() -> None:
            out = f(*inputs)
            out = out[0] if isinstance(out, tuple) else out
            torch.autograd.grad(out, inputs, torch.empty_like(out))

        return run

    t, hidden = TOKENS, HIDDEN
    yield "linear", both(linear, x(t, hidden), x(HEADS * DIM, hidden), x(HEADS * DIM))
    yield "row-parallel linear", both(lambda a, w: row_parallel(a, w, 4), x(t, HEADS * DIM), x(hidden, HEADS * DIM))
    yield "RMSNorm", both(lambda a, w: rms_norm(a, w, 1e-6), x(t, hidden), x(hidden))
    yield "RMSNorm of heads", both(lambda a, w: rms_norm(a, w, 1e-6), x(t, HEADS, DIM), x(DIM))
    channels = (x(t, 4096), x(t, 4096), x(4096))
    yield "gated group norm", both(lambda a, g, w: gated_group_norm(a, g, w, 8, 1e-5), *channels)
    yield "silu and multiply", both(silu_and_mul, x(t, 2 * WIDTH))
    yield "squared ReLU", both(squared_relu, x(t, 1856))
    table, positions = x(4096, 2, DIM // 2, kind=FP32), x(t, kind=INT64)
    yield "rotary", both(lambda a: apply_rotary(a, table, positions), x(t, HEADS, DIM))
    qkv = (x(t, HEADS, DIM), x(t, 4, DIM), x(t, 4, DIM))
    yield "attention of the learner", both(lambda q, k, v: attention(q, k, v, [t], DIM**-0.5), *qkv)
    # one that spreads the ranges of keys over programs, and one that takes them in turn
    for name, new in (("decoding", 1), ("a prefill", 64)):
        yield f"attention of {name}", paged(dtype, new)
    channels = (x(t, 6144), x(6144, 4), x(6144))
    yield "convolution", both(lambda a, w, b: causal_conv1d(a, w, b, [t // 2] * 2), *channels)
    past, numbers = x(16, 3, 6144), (x(9, kind=INT32), x(8, kind=INT32))
    yield "convolution with a cache", lambda: causal_conv1d_cached(*channels, *numbers, past, x(8, kind=INT64))
    heads = [x(64, kind=FP32) for _ in range(3)]
    inputs = (x(t, 64, 64), x(t, 64), heads[0], x(t, 8, 128), x(t, 8, 128), heads[1], heads[2])
    yield "scan", both(lambda *a: scan(*a, [t // 2] * 2), *inputs)
    blocks = ((64, 64, 128), (CHUNK, 64, 64), (CHUNK, 64), (CHUNK, 8, 128))
    kinds = (FP32, dtype, FP32, dtype)
    memory = [x(16, *shape, kind=kind) for shape, kind in zip(blocks, kinds, strict=True)]
    yield "scan with a cache", lambda: scan_cached_at(*inputs, *numbers, Cache(*memory, x(8, kind=INT64)))
    yield "router's gate", both(gate, x(t, hidden), x(EXPERTS, hidden))
    logits = x(t, EXPERTS, kind=FP32)
    yield "top-k of a softmax", both(lambda a: top_k(a, TOP, True), logits)
    bias = x(EXPERTS, kind=FP32)
    yield "top-k of sigmoids in groups", both(lambda a: top_k(a, 6, True, 2.5, True, bias, 2, 1), logits)
    experts = (x(EXPERTS, 2 * WIDTH, hidden), x(EXPERTS, hidden, WIDTH))
    yield "experts of the engine", lambda: mlp(x(t, hidden), x(t, TOP, kind=INT64), *experts)
    rows = [t // 4] * 4
    yield (
        "experts of the learner",
        both(lambda a, *w: grouped_linear(a, w, rows), x(t, hidden), *(x(WIDTH, hidden),) * 4),
    )
    yield "combine", both(combine, x(t, TOP, hidden), x(t, TOP, kind=FP32))
    targets = x(64, kind=INT64)
    head = (x(64, hidden), x(VOCABULARY, hidden))
    yield "log-probability", both(lambda a, w: log_prob(a, w, targets, VOCABULARY)[0], *head)
    yield "log-softmax", lambda: log_softmax(x(64, VOCABULARY))


def paged(dtype: torch.dtype, new: int) -> Callable[[], Tensor]:
    """Attention of ``new`` tokens each of 32 sequences over a cache of up to 16,384 keys of each."""
    sequences, blocks = 32, 128

    def run() -> Tensor:
        def x(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, dtype=kind, device="meta")

        tokens = sequences * new
        numbers = (x(sequences + 1, kind=INT32), x(sequences, kind=INT32))
        table, slots = x(sequences, blocks, kind=INT32), x(tokens, kind=INT64)
        plan = device_plan(table, slots, *numbers, tokens, HEADS // 4)
        cache = x(sequences * blocks, 4, 2, KEYS, DIM)
        return paged_attention(x(tokens, HEADS, DIM), x(tokens, 4, DIM), x(tokens, 4, DIM), cache, plan, DIM**-0.5)

    return run
