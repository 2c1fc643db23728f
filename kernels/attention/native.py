"""Attention by the compiled kernel: packed documents are pages of 128 keys like those of a cache."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.compiler import compiled

DTYPES = (torch.float32, torch.bfloat16)


class _Call(ctypes.Structure):
    """``Call`` of native.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "block", "head", "row")),
        *((name, ctypes.c_void_p) for name in ("table", "starts", "lengths")),
        *((name, ctypes.c_int64) for name in ("table_row", "sequences", "heads", "kv_heads", "dim")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("bf16", "threads")),
    )


@dataclass(frozen=True)
class Plan:
    """What the layers of a step have in common.

    Attributes:
        table: int64 [sequences, blocks], numbers of each sequence's blocks of keys and values.
        starts: int64 [sequences + 1], where the queries of each sequence begin.
        lengths: int64 [sequences], keys of each sequence; its queries are the last ones.
        slots: int64 [tokens], see ``dispatch.plan``; empty for packed documents.
    """

    table: Tensor
    starts: Tensor
    lengths: Tensor
    slots: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """The value of ``dispatch.attention``."""
    _check(q)
    if not (k.stride() == v.stride() and k.stride(2) == 1):
        k, v = k.contiguous(), v.contiguous()
    numbers = torch.tensor([0, *lengths])
    starts = numbers.cumsum(0)
    table = starts[:-1, None] + torch.arange(0, max(lengths, default=0), tiles.KEYS)
    token, head = k.stride()[:2]
    return _attend(q, k, v, Plan(table, starts, numbers[1:], starts[:0]), (token, head, token), scale)


def plan(block_table: Tensor, slots: Tensor, query_lengths: list[int], lengths: list[int]) -> Plan:
    """See ``dispatch.plan``."""
    starts = torch.tensor([0, *query_lengths]).cumsum(0)
    table = block_table[: len(lengths)].long().contiguous()
    return Plan(table, starts, torch.tensor(lengths), slots[: sum(query_lengths)].long().contiguous())


def paged_attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """See ``dispatch.paged_attention``."""
    tokens, kv_heads, dim = len(plan.slots), *k.shape[1:]
    if len(k) != tokens:
        raise ValueError(f"keys {tuple(k.shape)} for {tokens} new tokens")
    _check(q)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    size = cache.element_size()
    strides = (stride * size for x in (k, v) for stride in x.stride()[:2])
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (k, v, cache, plan.slots))
    numbers = (tokens, kv_heads, dim * size, *strides)
    compiled("attention").store_pages(*pointers, *map(ctypes.c_int64, numbers))
    return _attend(q, *cache.unbind(2), plan, (cache.stride(0), cache.stride(1), dim), scale)


def _check(q: Tensor) -> None:
    if q.device.type != "cpu" or q.dtype not in DTYPES:
        raise TypeError(f"operators = native: attention takes fp32 or bf16 on a CPU: {q.dtype} on {q.device}")


def _attend(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, strides: tuple[int, int, int], scale: float) -> Tensor:
    """``strides``: elements between blocks of successive numbers, between KV heads, and between keys of a block."""
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _Call(
        *(x.data_ptr() for x in (q, keys, values, out)),
        *q.stride()[:2],
        *strides,
        *(x.data_ptr() for x in (plan.table, plan.starts, plan.lengths)),
        plan.table.shape[1],
        len(plan.lengths),
        q.shape[1],
        keys.shape[1],
        q.shape[2],
        scale,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    compiled("attention").attend(ctypes.byref(call))
    return out
