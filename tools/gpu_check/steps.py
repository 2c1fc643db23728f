"""One new token of each of many sequences, as an engine decodes: operators whose rows are sequences with a cache."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention import paged_attention
from megatron_rlzero.kernels.attention.triton import device_plan
from megatron_rlzero.kernels.conv1d import causal_conv1d_cached
from megatron_rlzero.kernels.mamba import Cache, scan_cached_at
from tools.gpu_check.case import Operator, row_before
from tools.gpu_check.schedules import pages
from tools.gpu_check.sequences import LIMIT, WIDTH
from tools.gpu_check.sizes import DEVICE, SIZES, randn

S = SIZES


def operators() -> Iterator[tuple[str, str, Callable[[torch.dtype], Operator]]]:
    """As ``dense.operators``."""
    yield "attention", "attention of new tokens", _attention
    yield "conv1d", "convolution of new tokens", _conv
    yield "mamba", "scan of new tokens", _scan


def _starts(sequences: int) -> Tensor:
    return torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)


def _attention(dtype: torch.dtype) -> Operator:
    """Sequences are beginnings of one text, whose keys and values are in the cache; behind its end lies NaN."""
    length, group = max(S.documents), S.heads // S.kv_heads
    (table, cache), keys_values = pages([length], dtype), randn(2, length, S.kv_heads, S.dim, dtype=dtype)
    padded = F.pad(keys_values, (0, 0, 0, 0, 0, -length % tiles.KEYS), value=torch.nan)
    cache[table[0].long()] = padded.unflatten(1, (-1, tiles.KEYS)).permute(1, 3, 0, 2, 4)

    def call(q: Tensor, positions: Tensor) -> Tensor:
        slots = torch.full((len(q),), -1, device=DEVICE)  # nothing is stored
        unread = torch.full((len(q), S.kv_heads, S.dim), torch.nan, dtype=q.dtype, device=DEVICE)
        layers = device_plan(table.expand(len(q), -1), slots, _starts(len(q)), positions.int() + 1, len(q), group)
        return paged_attention(q, unread, unread, cache, layers, S.dim**-0.5)

    def oracle(q: Tensor, positions: Tensor) -> Tensor:
        k, v = keys_values.double().repeat_interleave(group, 2)
        scores = torch.einsum("rhd,khd->rhk", q, k) * S.dim**-0.5
        hidden = torch.arange(length, device=DEVICE) > positions[:, None]
        return torch.einsum("rhk,khd->rhd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)

    inputs = [randn(S.rows, S.heads, S.dim, dtype=dtype), torch.randint(0, length, (S.rows,), device=DEVICE)]
    other = row_before(call, [0, 1])
    return Operator(call, oracle, inputs, [0, 1], other, roundings=3, differentiable=False)


def _conv(dtype: torch.dtype) -> Operator:
    def call(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        starts = _starts(len(x))
        state = past.clone(memory_format=torch.contiguous_format)  # it is written
        return causal_conv1d_cached(x, weight, bias, starts, starts[1:], state, starts[:-1].long())

    def oracle(x: Tensor, past: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(bias + (torch.cat((past, x[:, None]), 1) * weight.T).sum(1))

    shapes = ((S.rows, S.channels), (S.rows, WIDTH - 1, S.channels), (S.channels, WIDTH), (S.channels,))
    inputs = [randn(*shape, dtype=dtype) for shape in shapes]
    return Operator(call, oracle, inputs, [0, 1], row_before(call, [0, 1]), differentiable=False)


def _scan(dtype: torch.dtype) -> Operator:
    """In the first three chunks; what a sequence has not written in its block is NaN."""
    (H, P, G, N), rows, c = S.scan, S.rows, tiles.CHUNK
    A, D, bias = -randn(H).abs() * 4 - 0.1, randn(H), randn(H) - 2

    def call(x, dt, B, C, positions, state, old_x, old_dt, old_B) -> Tensor:
        starts = _starts(len(x))
        blocks = (t.clone(memory_format=torch.contiguous_format) for t in (state, old_x, old_dt, old_B))
        cache = Cache(*blocks, starts[:-1].long())
        return scan_cached_at(x, dt, A, B, C, D, bias, starts, positions.int(), cache, LIMIT)

    def oracle(x, dt, B, C, positions, state, old_x, old_dt, old_B) -> Tensor:
        before = positions[:, None] // c * c + torch.arange(c, device=DEVICE) < positions[:, None]
        state = state.where((positions >= c)[:, None, None, None], 0)
        old_x, old_B = (t.where(before[..., None, None], 0) for t in (old_x, old_B))
        steps = torch.cat((old_dt.where(before[..., None], 0), F.softplus(dt + bias).clamp(*LIMIT)[:, None]), 1)
        xs = torch.cat((old_x, x[:, None]), 1)
        Bs, C = (t.repeat_interleave(H // G, -2) for t in (torch.cat((old_B, B[:, None]), 1), C))
        logs = (A * steps).cumsum(1)
        weights = (logs[:, -1:] - logs).exp() * steps * torch.einsum("rshn,rhn->rsh", Bs, C)
        read = torch.einsum("rhpn,rhn->rhp", state, C) * logs[:, -1].exp()[..., None]
        return read + torch.einsum("rsh,rshp->rhp", weights, xs) + D[:, None] * x

    positions = torch.randint(0, 3 * c, (rows,), device=DEVICE)
    unwritten = torch.arange(c, device=DEVICE) >= positions[:, None] % c
    state = randn(rows, H, P, N).masked_fill((positions < c)[:, None, None, None], torch.nan)
    old_x, old_B = (
        randn(rows, c, *shape, dtype=dtype).masked_fill(unwritten[..., None, None], torch.nan)
        for shape in ((H, P), (G, N))
    )
    old_dt = (torch.rand(rows, c, H, device=DEVICE) / 4 + LIMIT[0]).masked_fill(unwritten[..., None], torch.nan)
    shapes = ((rows, H, P), (rows, H), (rows, G, N), (rows, G, N))
    inputs = [*(randn(*shape, dtype=dtype) for shape in shapes), positions, state, old_x, old_dt, old_B]
    every = range(len(inputs))
    return Operator(call, oracle, inputs, every, row_before(call, every), differentiable=False)
