"""Attention as learner and engine call it, in the form that kernels/backend.py chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend, tiles
from megatron_rlzero.kernels.attention import native, paged, reference

if TYPE_CHECKING:
    from megatron_rlzero.kernels.attention import triton


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Softmax attention of every token over its document up to itself.

    Args:
        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. A KV head serves heads / kv_heads query heads.
        lengths: tokens of each document, in order; they sum to ``tokens``.
        scale: factor on the scores.

    Returns:
        [tokens, heads, dim], dtype of ``q``; scores, softmax and sums are fp32.

    The backward pass computes the weights again, in Triton or in torch; memory is linear in a document's length.
    """
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"documents of {sum(lengths)} tokens in all for {q.shape[0]} query rows")
    _check(q, k, v)
    return _Attention.apply(q, k, v, lengths, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lengths, scale):
        ctx.settings = (lengths, scale)
        if backend.triton(q):
            from megatron_rlzero.kernels.attention import triton

            out, sums = triton.attention(q, k, v, lengths, scale)
            ctx.save_for_backward(q, k, v, out, sums)
            return out
        ctx.save_for_backward(q, k, v)
        form = native if backend.native(q) else reference
        return form.attention(q, k, v, lengths, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if backend.triton(grad):
            from megatron_rlzero.kernels.attention.triton_backward import gradients
        else:
            from megatron_rlzero.kernels.attention.reference import gradients
        return *gradients(*ctx.saved_tensors, *ctx.settings, grad), None, None


def plan(
    block_table: Tensor,
    slots: Tensor,
    query_lengths: list[int],
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
) -> native.Plan | paged.Plan | triton.Plan:
    """Where the new tokens' keys and values go, and which rows meet which pages.

    Args:
        block_table: int [sequences, blocks of the longest], block numbers of tiles.KEYS tokens each.
        slots: int64 [tokens or more]: block * tiles.KEYS + place in it; negative for tokens that are not stored.
        query_lengths: new tokens of each sequence, in the order of the batch.
        lengths: tokens of each sequence, the new ones included.
    """
    if backend.triton(block_table):
        from megatron_rlzero.kernels.attention import triton

        return triton.plan(block_table, slots, query_lengths, lengths, heads // kv_heads)
    if backend.native(block_table):
        return native.plan(block_table, slots, query_lengths, lengths)
    return paged.plan(block_table, slots, query_lengths, lengths, heads, kv_heads, dim)


def plan_at(
    block_table: Tensor,
    slots: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> native.Plan | paged.Plan | triton.Plan:
    """``plan`` with counts that lie where the block table does.

    Args:
        block_table: int [sequences or more, blocks].
        slots: int64 [tokens or more], as in ``plan``.
        query_start: int32 [sequences + 1], where the new tokens of each sequence begin, and where the last ones end.
        lengths: int32 [sequences], tokens of each sequence, the new ones included.
        tokens: rows of the queries. On a GPU they may be more than the new tokens, and a sequence may have none;
            nothing is read back there, and launches depend on shapes alone.
    """
    if backend.triton(block_table):
        from megatron_rlzero.kernels.attention import triton

        return triton.device_plan(block_table, slots, query_start, lengths, tokens, heads // kv_heads)
    return plan(block_table, slots, query_start.diff().tolist(), lengths.tolist(), heads, kv_heads, dim)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: native.Plan | paged.Plan | triton.Plan, scale: float
) -> Tensor:
    """Stores the new tokens' keys and values, then attends from each new token to its sequence up to itself.

    Args:
        q: [tokens, heads, dim], the new tokens of sequence 0, then of sequence 1, ...
        k, v: [tokens, kv_heads, dim].
        cache: [blocks, kv_heads, 2, tiles.KEYS, dim], keys and values; written in place.

    Returns:
        [tokens, heads, dim], dtype of ``q``. What lies in the cache beyond a sequence's end has no influence.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.
    """
    _check(q, k, v, cache)
    wanted = (k.shape[1], 2, tiles.KEYS, k.shape[2])
    if cache.shape[1:] != wanted or not cache.is_contiguous():
        raise ValueError(f"cache {tuple(cache.shape)}; expected is contiguous [blocks, {', '.join(map(str, wanted))}]")
    if backend.triton(q):
        from megatron_rlzero.kernels.attention.triton import paged_attention as form
    else:
        form = (native if isinstance(plan, native.Plan) else paged).paged_attention
    return form(q, k, v, cache, plan, scale)


def _check(q: Tensor, k: Tensor, v: Tensor, *cache: Tensor) -> None:
    if any(x.device != q.device or x.dtype != q.dtype for x in (k, v, *cache)):
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v, *cache))
        raise TypeError(f"attention takes tensors of one dtype on one device: {kinds}")
    if k.shape != v.shape or (len(q), q.shape[2]) != (len(k), k.shape[2]) or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"queries, keys and values {shapes}; expected are [tokens, heads or kv_heads, dim]")
