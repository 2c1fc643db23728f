"""What is timed: operators in bf16, at the sizes of Qwen3-30B-A3B and Nemotron-3-Nano-30B-A3B (their config.json)."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.attention import attention, paged_attention, plan
from megatron_rlzero.kernels.conv1d import causal_conv1d, causal_conv1d_cached
from megatron_rlzero.kernels.experts import combine, grouped_linear, mlp
from megatron_rlzero.kernels.linear import linear, row_parallel
from megatron_rlzero.kernels.log_prob import log_prob, log_softmax
from megatron_rlzero.kernels.mamba import Cache, scan, scan_cached_at
from megatron_rlzero.kernels.norm import gated_group_norm, rms_norm
from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table
from megatron_rlzero.kernels.router import gate, top_k
from megatron_rlzero.kernels.tiles import CHUNK, KEYS
from tools.gpu_check.sizes import BF16, DEVICE, FP32, randn
from tools.gpu_check.times import Timed
from tools.published import MODELS, Sizes

#: tokens of a microbatch, sequences that are decoded, keys of each
TOKENS, SEQUENCES, CONTEXT = 4096, 64, 4096
QWEN, NEMOTRON = map(Sizes, MODELS)
#: of both models
EXPERTS, DIM = QWEN.experts, QWEN.dim
HIDDEN, WIDTH, TOP = QWEN.hidden, QWEN.width, QWEN.k
NEMOTRON_HIDDEN, NEMOTRON_WIDTH, NEMOTRON_TOP = NEMOTRON.hidden, NEMOTRON.width, NEMOTRON.k
HEADS, KV_HEADS, VOCABULARY = QWEN.heads, QWEN.kv_heads, QWEN.vocabulary
#: heads, head dimension, groups, state size; channels of the convolution
MAMBA, CHANNELS = NEMOTRON.scan, NEMOTRON.channels


def items() -> Iterator[tuple[str, str, Callable[[], Timed]]]:
    """Folder in kernels/, name, and what makes it."""
    yield "linear", "linear, Qwen3 query-key-value", partial(_linear, TOKENS, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
    yield "linear", "linear, Nemotron Mamba input", partial(_linear, TOKENS, NEMOTRON_HIDDEN, 10_304)
    yield "linear", "linear, Qwen3 query-key-value, decoding", partial(_linear, SEQUENCES, HIDDEN, 5120, False)
    yield "linear", "row-parallel linear, Qwen3 attention output", _row_parallel
    yield "norm", "RMSNorm, Qwen3", partial(_norm, HIDDEN)
    yield "norm", "RMSNorm of heads, Qwen3", partial(_norm, HEADS, DIM)
    yield "norm", "gated group norm, Nemotron", _gated_norm
    yield "rotary", "rotary, Qwen3", _rotary
    yield "attention", "attention, Qwen3, one document", partial(_attention, 1)
    yield "attention", "attention, Qwen3, eight documents", partial(_attention, 8)
    yield "attention", "attention, Qwen3, decoding", _decoding
    yield "router", "gate, Qwen3", _gate
    yield "router", "top-k, Qwen3", _top_k
    yield "experts", "experts, Qwen3", partial(_mlp, TOKENS, HIDDEN, WIDTH, TOP)
    yield "experts", "experts, Qwen3, decoding", partial(_mlp, SEQUENCES, HIDDEN, WIDTH, TOP)
    yield "experts", "experts, Nemotron", partial(_mlp, TOKENS, NEMOTRON_HIDDEN, NEMOTRON_WIDTH, NEMOTRON_TOP, False)
    yield "experts", "grouped linear, Qwen3 gate and up", _grouped
    yield "experts", "combine, Qwen3", _combine
    yield "activation", "silu and multiply, Qwen3 experts", _silu_and_mul
    yield "activation", "squared ReLU, Nemotron experts", _squared_relu
    yield "log_prob", "log-probability, Qwen3", _log_prob
    yield "log_prob", "log-softmax, Qwen3, decoding", _log_softmax
    yield "conv1d", "convolution, Nemotron", _conv
    yield "conv1d", "convolution, Nemotron, decoding", _conv_decoding
    yield "mamba", "scan, Nemotron", _scan
    yield "mamba", "scan, Nemotron, decoding", _scan_decoding


def x(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return randn(*shape, dtype=dtype, scale=0.5)


def _linear(rows: int, k: int, n: int, differentiable: bool = True) -> Timed:
    inputs = x(rows, k), x(n, k)
    library = "F.linear", F.linear, inputs
    return Timed(linear, inputs, library, flops=2.0 * rows * k * n, differentiable=differentiable)


def _row_parallel() -> Timed:
    inputs = x(TOKENS, HEADS * DIM), x(HIDDEN, HEADS * DIM)
    library, flops = ("F.linear", F.linear, inputs), 2.0 * TOKENS * HEADS * DIM * HIDDEN
    return Timed(lambda a, w: row_parallel(a, w, 4), inputs, library, flops)


def _norm(*shape: int) -> Timed:
    inputs = x(TOKENS, *shape), x(shape[-1])
    library = "F.rms_norm", lambda a, w: F.rms_norm(a, w.shape, w, 1e-6), inputs
    return Timed(lambda a, w: rms_norm(a, w, 1e-6), inputs, library)


def _gated_norm() -> Timed:
    inputs = x(TOKENS, 4096), x(TOKENS, 4096), x(4096)

    def library(a: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm((a * F.silu(g)).unflatten(1, (8, 512)), (512,), None, 1e-5).flatten(1) * w

    return Timed(lambda a, g, w: gated_group_norm(a, g, w, 8, 1e-5), inputs, ("F.silu, F.rms_norm", library, inputs))


def _rotary() -> Timed:
    table, positions = rotary_table(TOKENS, DIM, 1e6, DEVICE), torch.arange(TOKENS, device=DEVICE)
    cos, sin = (torch.cat((t, t), -1).to(BF16)[:, None] for t in table.unbind(1))

    def library(a: Tensor) -> Tensor:
        first, second = a.chunk(2, -1)
        return a * cos + torch.cat((-second, first), -1) * sin

    inputs = [x(TOKENS, HEADS, DIM)]
    return Timed(lambda a: apply_rotary(a, table, positions), inputs, ("elementwise in torch", library, inputs))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _attention(documents: int) -> Timed:
    length = TOKENS // documents
    inputs = [x(TOKENS, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    batch = [t.view(documents, length, *t.shape[1:]).transpose(1, 2) for t in inputs]
    library = "scaled_dot_product_attention", lambda *t: _sdpa(*t, causal=True), batch
    flops = 2.0 * documents * length**2 * HEADS * DIM
    return Timed(lambda q, k, v: attention(q, k, v, [length] * documents, DIM**-0.5), inputs, library, flops, back=2.5)


def _decoding() -> Timed:
    pages = SEQUENCES * CONTEXT // KEYS
    table = torch.randperm(pages, device=DEVICE).view(SEQUENCES, -1).int()
    cache = x(pages, KV_HEADS, 2, KEYS, DIM)
    slots = table[:, -1].long() * KEYS + KEYS - 1
    layers = plan(table, slots, [1] * SEQUENCES, [CONTEXT] * SEQUENCES, HEADS, KV_HEADS, DIM)
    inputs = [x(SEQUENCES, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    batch = [x(SEQUENCES, HEADS, 1, DIM), *(x(SEQUENCES, KV_HEADS, CONTEXT, DIM) for _ in range(2))]
    library = "scaled_dot_product_attention", lambda *t: _sdpa(*t, causal=False), batch
    return Timed(
        lambda q, k, v: paged_attention(q, k, v, cache, layers, DIM**-0.5), inputs, library,
        flops=4.0 * SEQUENCES * CONTEXT * HEADS * DIM, moved=cache.numel() * 2, differentiable=False,
    )  # fmt: skip


def _gate() -> Timed:
    inputs = x(TOKENS, HIDDEN), x(EXPERTS, HIDDEN)
    return Timed(gate, inputs, ("F.linear in fp32", lambda a, w: F.linear(a.float(), w.float()), inputs))


def _top_k() -> Timed:
    inputs = [x(TOKENS, EXPERTS, dtype=FP32)]

    def library(logits: Tensor) -> Tensor:
        p = logits.softmax(-1).topk(TOP).values
        return p / p.sum(-1, keepdim=True)

    return Timed(lambda logits: top_k(logits, TOP, True)[0], inputs, ("softmax and topk", library, inputs))


def _counts(rows: int) -> list[int]:
    """Rows of each expert, about equal."""
    return torch.bincount(torch.randint(0, EXPERTS, (rows,)), minlength=EXPERTS).tolist()


def _by_loop(a: Tensor, weights: list[Tensor], counts: list[int]) -> Tensor:
    return torch.cat([F.linear(part, w) for part, w in zip(a.split(counts), weights, strict=True)])


def _mlp(tokens: int, hidden: int, width: int, top: int, gated: bool = True) -> Timed:
    w13, w2 = x(EXPERTS, 2 * width if gated else width, hidden), x(EXPERTS, hidden, width)
    experts = torch.rand(tokens, EXPERTS, device=DEVICE).topk(top).indices.sort(-1).values
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()

    def library(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = _by_loop(rows, first.unbind(), counts)
        y = F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else F.relu(y).square()
        return _by_loop(y, second.unbind(), counts)

    rows = tokens * top
    return Timed(
        lambda a, e, first, second: mlp(a, e, first, second, gated), [x(tokens, hidden), experts, w13, w2],
        ("F.linear by expert", library, [x(rows, hidden), w13, w2]),
        flops=2.0 * rows * (w13[0].numel() + w2[0].numel()), differentiable=False,
    )  # fmt: skip


def _grouped() -> Timed:
    rows, counts = TOKENS * TOP, _counts(TOKENS * TOP)
    inputs = [x(rows, HIDDEN), *(x(2 * WIDTH, HIDDEN) for _ in range(EXPERTS))]
    library = "F.linear by expert", lambda a, *w: _by_loop(a, w, counts), inputs
    return Timed(lambda a, *w: grouped_linear(a, w, counts), inputs, library, flops=4.0 * rows * HIDDEN * WIDTH)


def _combine() -> Timed:
    inputs = x(TOKENS, TOP, HIDDEN), torch.rand(TOKENS, TOP, device=DEVICE)
    return Timed(combine, inputs, ("(y * p).sum", lambda y, p: (y * p.to(BF16)[..., None]).sum(1), inputs))


def _silu_and_mul() -> Timed:
    inputs = [x(TOKENS * TOP, 2 * WIDTH)]
    return Timed(silu_and_mul, inputs, ("F.silu(gate) * up", lambda a: F.silu(a[:, :WIDTH]) * a[:, WIDTH:], inputs))


def _squared_relu() -> Timed:
    inputs = [x(TOKENS * NEMOTRON_TOP, NEMOTRON_WIDTH)]
    return Timed(squared_relu, inputs, ("F.relu, square", lambda a: F.relu(a).square(), inputs))


def _log_prob() -> Timed:
    tokens = TOKENS // 2
    inputs, targets = (x(tokens, HIDDEN), x(VOCABULARY, HIDDEN)), torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)

    def library(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    return Timed(
        lambda h, w: log_prob(h, w, targets, VOCABULARY, slices=4)[0], inputs,
        ("F.linear, log_softmax, gather", library, inputs), flops=2.0 * tokens * HIDDEN * VOCABULARY,
    )  # fmt: skip


def _log_softmax() -> Timed:
    inputs = [x(SEQUENCES, VOCABULARY)]
    library = "torch.log_softmax in fp32", lambda a: a.float().log_softmax(-1), inputs
    return Timed(log_softmax, inputs, library, differentiable=False)


def _conv() -> Timed:
    inputs = x(TOKENS, CHANNELS), x(CHANNELS, 4), x(CHANNELS)

    def library(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.conv1d(a.T[None], w[:, None], b, padding=3, groups=CHANNELS)[0, :, :TOKENS].T)

    call = lambda a, w, b: causal_conv1d(a, w, b, [TOKENS // 2] * 2)  # noqa: E731
    return Timed(call, inputs, ("F.conv1d, F.silu", library, inputs))


def _counters() -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of one new token each, positions in the middle of a chunk, slots."""
    numbers = torch.arange(SEQUENCES + 1, device=DEVICE)
    return numbers.int(), torch.full((SEQUENCES,), CONTEXT + CHUNK // 2, dtype=torch.int32, device=DEVICE), numbers[:-1]


def _conv_decoding() -> Timed:
    bounds, positions, slots = _counters()
    state, inputs = x(SEQUENCES, 3, CHANNELS), (x(SEQUENCES, CHANNELS), x(CHANNELS, 4), x(CHANNELS))
    call = lambda a, w, b: causal_conv1d_cached(a, w, b, bounds, positions, state, slots)  # noqa: E731
    return Timed(call, inputs, moved=2 * (2 * inputs[0].numel() + 2 * state.numel()), differentiable=False)


def _scan_inputs(tokens: int) -> list[Tensor]:
    H, P, G, N = MAMBA
    B, C = x(tokens, G, N), x(tokens, G, N)
    return [x(tokens, H, P), x(tokens, H), -x(H, dtype=FP32).abs() - 0.1, B, C, x(H, dtype=FP32), x(H, dtype=FP32) - 2]


def _scan() -> Timed:
    return Timed(lambda *t: scan(*t, [TOKENS // 2] * 2), _scan_inputs(TOKENS))


def _scan_decoding() -> Timed:
    (H, P, G, N), (bounds, positions, slots) = MAMBA, _counters()
    blocks = x(SEQUENCES, H, P, N, dtype=FP32), x(SEQUENCES, CHUNK, H, P), x(SEQUENCES, CHUNK, H, dtype=FP32).abs()
    cache = Cache(*blocks, x(SEQUENCES, CHUNK, G, N), slots)
    call = lambda *t: scan_cached_at(*t, bounds, positions, cache)  # noqa: E731
    moved = sum(t.numel() * t.element_size() for t in cache[:4])
    return Timed(call, _scan_inputs(SEQUENCES), moved=moved, differentiable=False)
