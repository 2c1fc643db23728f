"""Attention's gradients in Triton: the weights are computed again, every sum has one program and one order.

From the log-sum-exp of a row and delta = sum_d dO_d O_d, all fp32:

    P = exp(s - log-sum-exp), 0 for keys that the row does not see;  dS = P * (dO V^T - delta)
    dV = P^T dO and dK = (dS^T Q) * scale   of a tile of keys: tiles of rows from the first that sees them to the last
    dQ = (dS K) * scale                     of a tile of rows: tiles of keys from the first to the last that they see

Rows are pairs of a token and a query head of the KV head's group, heads of a token together. P and dS are rounded to
the dtype of q for a product; gradients are rounded once. No memory grows faster than the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, segments, tiles
from megatron_rlzero.kernels.attention import triton as forward
from megatron_rlzero.kernels.attention.triton_forward import rows_of


@triton.jit(do_not_specialize=["rows"])
def delta_of(out, grad, delta, rows, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """fp32 [rows]: sums over d of out * grad, both contiguous [rows, DIM]."""
    row, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    at = row.to(tl.int64)[:, None] * DIM + d[None, :]
    there = (row < rows)[:, None] & (d[None, :] < DIM)
    x = tl.load(out + at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(x * y, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["documents", "group", "scale"])
def to_keys(
    q, k, v, grad, sums, delta, grad_k, grad_v, starts, bounds, documents, group, scale,
    q_token, q_head, k_token, k_head, v_token, v_head,
    DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program: tile of N keys of a document, KV head. Scores are transposed here: [keys, rows]."""
    tile, head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i = segments.segment_of(bounds, documents, tile)
    start = tl.load(starts + i)
    length = tl.load(starts + i + 1) - start
    begin = (tile - tl.load(bounds + i)) * N
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    there = (n < length - begin)[:, None] & (d[None, :] < DIM)
    token, start, head = (start + begin).to(tl.int64), start.to(tl.int64), head.to(tl.int64)
    keys = tl.load(k + (token * k_token + head * k_head) + (n[:, None] * k_token + d[None, :]), there, 0.0)
    values = tl.load(v + (token * v_token + head * v_head) + (n[:, None] * v_token + d[None, :]), there, 0.0)
    q += head * group * q_head
    nothing = tl.full((N, M), 0.0, tl.float32)
    to_k, to_v = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32)
    for first in range(begin * group, length * group, M):
        position = first // group
        ahead, member = (first + m) // group - position, (first + m) % group
        real = first + m < length * group
        filled = real[:, None] & (d[None, :] < DIM)
        query = start + position
        x = tl.load(
            q + query * q_token + (ahead[:, None] * q_token + member[:, None] * q_head + d[None, :]), filled, 0.0
        )
        first_row, row = (query * kv_heads + head) * group, ahead * (kv_heads * group) + member
        y = tl.load(grad + first_row * DIM + (row[:, None] * DIM + d[None, :]), filled, 0.0)
        scores = gpu.dot(keys, tl.trans(x), nothing) * scale
        weights = tl.exp(scores - tl.load(sums + first_row + row, real, 0.0)[None, :])
        seen = (n[:, None] <= (position - begin + ahead)[None, :]) & real[None, :]
        weights = tl.where(seen, weights, 0.0)
        to_v = gpu.dot(gpu.rounded(weights, y.dtype), y, to_v)
        d_weights = gpu.dot(values, tl.trans(y), nothing)
        d_scores = weights * (d_weights - tl.load(delta + first_row + row, real, 0.0)[None, :])
        to_k = gpu.dot(gpu.rounded(d_scores, x.dtype), x, to_k)
    first_row, at = (token * kv_heads + head) * DIM, n[:, None] * (kv_heads * DIM) + d[None, :]
    tl.store(grad_k + first_row + at, gpu.rounded(to_k * scale, grad_k.dtype.element_ty), mask=there)
    tl.store(grad_v + first_row + at, gpu.rounded(to_v, grad_v.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["documents", "group", "scale"])
def to_queries(
    q, k, v, grad, sums, delta, grad_q, starts, lengths, bounds, documents, group, scale,
    q_token, q_head, k_token, k_head, v_token, v_head,
    DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program: tile of M rows of a document, KV head."""
    i, token, position, ahead, member, real, end = rows_of(starts, lengths, bounds, documents, group, M)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1) * group
    d, n = tl.arange(0, D), tl.arange(0, N)
    there = real[:, None] & (d[None, :] < DIM)
    token = token.to(tl.int64)
    q += token * q_token + head * group * q_head
    x = tl.load(q + (ahead[:, None] * q_token + member[:, None] * q_head + d[None, :]), mask=there, other=0.0)
    first_row, row = token * heads + head * group, ahead * heads + member
    y = tl.load(grad + first_row * DIM + (row[:, None] * DIM + d[None, :]), mask=there, other=0.0)
    top = tl.load(sums + first_row + row, mask=real, other=0.0)
    mean = tl.load(delta + first_row + row, mask=real, other=0.0)
    start = tl.load(starts + i).to(tl.int64)
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    nothing = tl.full((M, N), 0.0, tl.float32)
    to_q = tl.zeros((M, D), tl.float32)
    for first in range(0, end, N):
        key = tl.cast(first, tl.int64)
        filled = (n < end - first)[:, None] & (d[None, :] < DIM)
        keys = tl.load(k + key * k_token + (n[:, None] * k_token + d[None, :]), mask=filled, other=0.0)
        values = tl.load(v + key * v_token + (n[:, None] * v_token + d[None, :]), mask=filled, other=0.0)
        scores = gpu.dot(x, tl.trans(keys), nothing) * scale
        weights = tl.exp(scores - top[:, None])
        weights = tl.where(n[None, :] <= (position - first + ahead)[:, None], weights, 0.0)
        d_weights = gpu.dot(y, tl.trans(values), nothing)
        d_scores = weights * (d_weights - mean[:, None])
        to_q = gpu.dot(gpu.rounded(d_scores, keys.dtype), keys, to_q)
    _, token, _, ahead, member, real, _ = rows_of(starts, lengths, bounds, documents, group, M)
    first_row, row = token.to(tl.int64) * heads + head * group, ahead * heads + member
    there = real[:, None] & (d[None, :] < DIM)
    at = grad_q + first_row * DIM + (row[:, None] * DIM + d[None, :])
    tl.store(at, gpu.rounded(to_q * scale, grad_q.dtype.element_ty), mask=there)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, lengths: list[int], scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype, for ``grad`` like q; ``out`` and ``sums`` are those of the forward."""
    results = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    if not q.numel():
        return results
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    grad, delta = grad.contiguous(), torch.empty_like(sums)
    known = tiles.gpu(q.device)
    tile = known.attention_fp32 if q.dtype == torch.float32 else known.attention_backward
    columns = {"DIM": dim, "D": forward.width(dim)}
    delta_of[(triton.cdiv(tokens * heads, tile.m),)](
        out, grad, delta, tokens * heads, **columns, M=tile.m, **gpu.options(tile)
    )
    plan = forward.documents(tuple(lengths), group, q.device)
    documents = len(lengths)
    read = (q, k, v, grad, sums, delta)
    numbers = (documents, group, scale, *(stride for x in (q, k, v) for stride in x.stride()[:2]))
    options = {**columns, "N": tile.n, **gpu.options(tile)}
    bounds = segments.tile_bounds(plan.starts, tile.n)
    grid = (segments.most_tiles(tokens, documents, tile.n), kv_heads)
    to_keys[grid](*read, *results[1:], plan.starts, bounds, *numbers, M=tile.m, **options)
    m = known.attention.m
    grid = (segments.most_tiles(tokens * group, documents, m), kv_heads)
    to_queries[grid](*read, results[0], plan.starts, plan.lengths, plan.bounds, *numbers, M=m, **options)
    return results
