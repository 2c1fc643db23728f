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
    documents, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    # [documents * kv_heads, heads per KV head, n, dim]: the rows of a KV head's queries form one product.
    q = q.float().reshape(documents, n, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.float().transpose(1, 2).flatten(0, 1) for x in (k, v))
    v = F.pad(v, (0, 0, 0, -n % tiles.KEYS))
    chunks = []
    for first in range(0, n, tiles.QUERIES):
        rows = q[:, :, first : first + tiles.QUERIES]
        last = first + rows.shape[2]
        keys, values = k[:, :last], v[:, : tiles.round_up(last, tiles.KEYS)]
        if n > tiles.QUERIES and torch.is_grad_enabled():
            chunks.append(checkpoint(_chunk, rows, keys, values, first, scale, use_reentrant=False))
        else:
            chunks.append(_chunk(rows, keys, values, first, scale))
    out = torch.cat(chunks, dim=2).unflatten(0, (documents, kv_heads))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _chunk(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Query rows ``first`` .. of every head against keys 0 .. ; fp32 throughout.

    q [b, group, rows, dim], k [b, keys, dim], v [b, keys padded to a multiple of KEYS, dim] -> like q.
    """
    b, group, rows, dim = q.shape
    scores = torch.bmm(q.reshape(b, group * rows, dim), k.transpose(1, 2)) * scale
    query = torch.arange(first, first + rows, device=q.device).repeat(group)
    hidden = torch.arange(k.shape[1], device=q.device) > query[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    weights = F.pad(weights, (0, v.shape[1] - k.shape[1]))
    out = torch.bmm(weights[:, :, : tiles.KEYS], v[:, : tiles.KEYS])
    for block in range(tiles.KEYS, v.shape[1], tiles.KEYS):
        keys = slice(block, block + tiles.KEYS)
        out = out + torch.bmm(weights[:, :, keys], v[:, keys])
    return out.reshape(q.shape)
