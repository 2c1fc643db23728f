"""Causal attention over packed documents, built from products of fixed shape.

A query row sees the scores of all keys up to its own, a softmax over them, and its product with the values in blocks
of tiles.KEYS keys added from left to right. Nothing in that depends on the other documents of the pack.
"""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megatron_rlzero.kernels import tiles


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Softmax attention of every token over its document up to itself.

    Args:
        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]. A KV head serves heads / kv_heads query heads.
        lengths: tokens of each document, in order; they sum to ``tokens``.
        scale: factor on the scores.

    Returns:
        [tokens, heads, dim], dtype of ``q``; scores, softmax and sums are fp32.

    Documents of one padded length are batched, which changes no bit. Memory is linear in a document's length: a
    chunk of tiles.QUERIES queries is recomputed in the backward pass.
    """
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"documents of {sum(lengths)} tokens in all for {q.shape[0]} query rows")
    parts, order = [], []
    for padded, documents in _by_padded_length(lengths).items():
        # [documents, padded] token indices; beyond a document's end its last token again, which the causal mask
        # hides from every real query.
        offsets = torch.arange(padded, device=q.device)
        start = torch.tensor([d[0] for d in documents], device=q.device)[:, None]
        length = torch.tensor([d[1] for d in documents], device=q.device)[:, None]
        index = start + torch.minimum(offsets, length - 1)
        real = offsets < length
        parts.append(_causal(q[index], k[index], v[index], scale)[real].to(q.dtype))
        order.append(index[real])
    return torch.cat(parts)[torch.cat(order).argsort()]


def _by_padded_length(lengths: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Padded length -> (start, length) of the documents that have it."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(accumulate([0, *lengths]), lengths, strict=False):
        if length:
            multiple = tiles.ROWS if length <= tiles.KEYS else tiles.KEYS
            groups.setdefault(tiles.round_up(length, multiple), []).append((start, length))
    return groups


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [documents, n, heads, dim], k and v [documents, n, kv_heads, dim] -> fp32, like q."""
    documents, n = q.shape[:2]
    q, k, v = by_kv_head(q, k.shape[2]), *(x.float().transpose(1, 2).flatten(0, 1) for x in (k, v))
    v = F.pad(v, (0, 0, 0, -n % tiles.KEYS))
    chunks = []
    for first in range(0, n, tiles.QUERIES):
        rows = q[:, :, first : first + tiles.QUERIES]
        last = first + rows.shape[2]
        positions = torch.arange(first, last, device=q.device)[None]
        arguments = (rows, k[:, :last], v[:, : tiles.round_up(last, tiles.KEYS)], positions, scale)
        if n > tiles.QUERIES and torch.is_grad_enabled():
            chunks.append(checkpoint(attend, *arguments, use_reentrant=False))
        else:
            chunks.append(attend(*arguments))
    return by_token(torch.cat(chunks, dim=2), documents)


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """[b, n, heads, dim] -> fp32 [b * kv_heads, heads per KV head, n, dim]: one KV head's queries form one product."""
    return q.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def by_token(out: Tensor, b: int) -> Tensor:
    """The inverse of ``by_kv_head``: [b * kv_heads, heads per KV head, n, dim] -> [b, n, heads, dim]."""
    return out.unflatten(0, (b, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Query rows at ``positions`` against keys 0, 1, ...: the one arithmetic, fp32 throughout.

    Args:
        q: [b, group, rows, dim]; group * rows is at least 8.
        k: [b, keys, dim].
        v: [b, keys padded to a multiple of tiles.KEYS, dim]; finite everywhere.
        positions: int64 [1 or b, rows]; a row sees the keys up to its own position.

    Returns:
        Like ``q``.
    """
    b, group, rows, dim = q.shape
    scores = torch.bmm(q.reshape(b, group * rows, dim), k.transpose(1, 2)) * scale
    hidden = torch.arange(k.shape[1], device=q.device) > positions.repeat(1, group)[..., None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    weights = F.pad(weights, (0, v.shape[1] - k.shape[1]))
    out = torch.bmm(weights[:, :, : tiles.KEYS], v[:, : tiles.KEYS])
    for block in range(tiles.KEYS, v.shape[1], tiles.KEYS):
        keys = slice(block, block + tiles.KEYS)
        out = out + torch.bmm(weights[:, :, keys], v[:, keys])
    return out.reshape(q.shape)
