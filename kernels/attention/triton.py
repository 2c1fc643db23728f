"""Attention in Triton: packed documents are pages of 128 keys like those of a cache, read by the same kernel.

What is launched depends on nothing but the shapes of tensors; where sequences begin and end is read on the device.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from torch import Tensor

from megatron_rlzero.kernels import gpu, segments, tiles
from megatron_rlzero.kernels.attention import triton_forward as kernels
from megatron_rlzero.kernels.backend import INTERPRETED

#: fp32 numbers of partial results that may exist at one time. If those of all ranges of keys are no more, as when
#: decoding, each range is a program of its own, else one program takes them in turn: the same bits.
PARTIAL = 2**14 if INTERPRETED else 2**24


@dataclass(frozen=True)
class Plan:
    """What the layers of a step have in common.

    Attributes:
        table: int32 [sequences, blocks], numbers of each sequence's blocks of keys and values.
        slots: int64 [tokens], see ``dispatch.plan``; empty for packed documents.
        starts: int32 [sequences + 1], where the queries of each sequence begin.
        lengths: int32 [sequences], keys of each sequence; its queries are the last ones.
        bounds: int32 [sequences + 1], the first tile of rows of each sequence.
        group: query heads of a KV head.
    """

    table: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    bounds: Tensor
    group: int


def device_plan(
    block_table: Tensor, slots: Tensor, query_start: Tensor, lengths: Tensor, tokens: int, group: int
) -> Plan:
    """A plan from numbers that lie on the device; nothing is copied from there, and shapes depend on shapes alone.

    It makes tensors: where a CUDA graph is captured, call it in there.

    Args:
        block_table: int [sequences or more, blocks].
        slots: int64 [tokens or more].
        query_start: int32 [sequences + 1], where the new tokens of each sequence begin, and where the last ones end.
        lengths: int32 [sequences], tokens of each sequence, the new ones included. A sequence without new tokens,
            of whatever length, changes nothing.
        tokens: rows of the queries, no fewer than there are new tokens; results of the others are zeros.
        group: query heads of a KV head.
    """
    starts, lengths = query_start.int(), lengths.int()
    bounds = segments.tile_bounds(starts * group, tiles.gpu(starts.device).attention.m)
    return Plan(block_table[: len(lengths)].int(), slots[:tokens].long(), starts, lengths, bounds, group)


def plan(block_table: Tensor, slots: Tensor, query_lengths: list[int], lengths: list[int], group: int) -> Plan:
    """See ``dispatch.plan``."""
    starts = segments.bounds_of(query_lengths, block_table.device)
    ends = torch.tensor(lengths, dtype=torch.int32).to(block_table.device, non_blocking=True)
    return device_plan(block_table, slots, starts, ends, sum(query_lengths), group)


@lru_cache(maxsize=2)
def documents(lengths: tuple[int, ...], group: int, device: torch.device) -> Plan:
    """The plan of packed documents, the same for every layer: block numbers are rows of the keys."""
    starts = segments.bounds_of(lengths, device)
    table = starts[:-1, None] + torch.arange(0, max(lengths, default=0), tiles.KEYS, device=device)
    return device_plan(table, starts[:0], starts, starts.diff(), sum(lengths), group)


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> tuple[Tensor, Tensor]:
    """The value of ``dispatch.attention``, and the log-sum-exp of each row's scores, fp32 [tokens, heads]."""
    if k.stride() != v.stride() or k.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    token, head, _ = k.stride()
    made = documents(tuple(lengths), q.shape[1] // k.shape[1], q.device)
    return _attend(q, k, v, made, (token, head, token), torch.empty(q.shape, dtype=q.dtype, device=q.device), scale)


def paged_attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """See ``dispatch.paged_attention``."""
    tokens, kv_heads, dim = len(plan.slots), *k.shape[1:]
    if len(k) != tokens:
        raise ValueError(f"keys {tuple(k.shape)} for {tokens} new tokens")
    if q.shape[1] != plan.group * kv_heads:
        raise ValueError(f"{q.shape[1]} query heads and {kv_heads} KV heads; planned were {plan.group} of one KV head")
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    block, head = cache.stride()[:2]
    tile = tiles.gpu(q.device).row
    kernels.write[(triton.cdiv(tokens, tile.m), kv_heads)](
        k, v, cache, plan.slots, tokens, *k.stride()[:2], *v.stride()[:2], block, head,
        PAGE=tiles.KEYS, DIM=dim, D=width(dim), M=tile.m, **gpu.options(tile),
    )  # fmt: skip
    return _attend(q, *cache.unbind(2), plan, (block, head, dim), out, scale)[0]


def width(dim: int) -> int:
    """Columns of a tile that holds ``dim``; the ones beyond are zeros."""
    return max(triton.next_power_of_2(dim), 16)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, plan: Plan, strides: tuple[int, int, int], out: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``out`` and the log-sum-exp. ``strides``: elements between blocks of successive numbers, KV heads, and keys."""
    tokens, heads, dim = q.shape
    rows, sequences = tokens * heads, len(plan.lengths)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if not rows or not sequences:
        return out, sums
    if q.stride(2) != 1:
        q = q.contiguous()
    known = tiles.gpu(q.device)
    tile = known.attention_fp32 if q.dtype == torch.float32 else known.attention
    sizes = {"SPLIT": tile.split, "DIM": dim, "D": width(dim), "M": tile.m}
    splits = triton.cdiv(plan.table.shape[1] * tiles.KEYS, tile.split)
    apart = splits if splits * rows * dim <= PARTIAL else 1
    states = torch.empty(apart, 2, rows if apart > 1 else 0, dtype=torch.float32, device=q.device)
    parts = torch.empty(apart, rows if apart > 1 else 0, dim, dtype=torch.float32, device=q.device)
    grid = (segments.most_tiles(tokens * plan.group, sequences, tile.m), heads // plan.group)
    where = (plan.starts, plan.lengths, plan.bounds)
    kernels.attend[(*grid, apart)](
        q, keys, values, out, sums, states, parts, plan.table, *where,
        plan.table.stride(0), sequences, plan.group, rows, splits // apart, scale, *q.stride()[:2], *strides,
        PAGE=tiles.KEYS, N=tile.n, **sizes, **gpu.options(tile),
    )  # fmt: skip
    if apart > 1:
        options = gpu.options(replace(tile, warps=16))
        kernels.merge[grid](out, sums, states, parts, *where, sequences, plan.group, rows, **sizes, **options)
    return out, sums
