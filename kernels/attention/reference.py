"""Causal attention over packed documents, built from products of fixed shape.

A query row sees the scores of all keys up to its own, a softmax over them, and its product with the values in blocks
of tiles.KEYS keys added from left to right. Nothing in that depends on the other documents of the pack.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
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
    """Length padded to whole row tiles -> (start, length) of the documents that have it."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(accumulate([0, *lengths]), lengths, strict=False):
        if length:
            groups.setdefault(tiles.round_up(length, tiles.ROWS), []).append((start, length))
    return groups


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [documents, n, heads, dim], k and v [documents, n, kv_heads, dim] -> fp32, like q."""
    documents, n = q.shape[:2]
    q, k, v = by_kv_head(q, k.shape[2]), *(x.float().transpose(1, 2).flatten(0, 1) for x in (k, v))
    chunks = []
    for first in range(0, n, tiles.QUERIES):
        arguments = (q[:, :, first : first + tiles.QUERIES], k, v, first, documents, scale)
        if n > tiles.QUERIES and torch.is_grad_enabled():
            chunks.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            chunks.append(_chunk(*arguments))
    return by_token(torch.cat(chunks, dim=2), documents)


def _chunk(q: Tensor, k: Tensor, v: Tensor, first: int, documents: int, scale: float) -> Tensor:
    """Query rows ``first`` ... of every document against the key blocks that they see."""
    last = first + q.shape[2]
    position, key = torch.arange(first, last, device=q.device), torch.arange(last, device=q.device).split(tiles.KEYS)
    hidden = {j: (key[j] > position[:, None])[None, None, None] for j in range((first + 1) // tiles.KEYS, len(key))}
    keys_values = list(zip(*(x[:, :last].split(tiles.KEYS, 1) for x in (k, v)), strict=True))
    return attend(q, keys_values, hidden, documents, scale)


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """[b, n, heads, dim] -> fp32 [b * kv_heads, heads per KV head, n, dim]: one KV head's queries form one product."""
    return q.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def by_token(out: Tensor, b: int) -> Tensor:
    """The inverse of ``by_kv_head``: [b * kv_heads, heads per KV head, n, dim] -> [b, n, heads, dim]."""
    return out.unflatten(0, (b, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend(
    q: Tensor, keys_values: Sequence[Sequence[Tensor]], hidden: Mapping[int, Tensor], documents: int, scale: float
) -> Tensor:
    """The one arithmetic of attention: scores of all key blocks, a softmax over them, values block after block.

    Args:
        q: fp32 [documents * kv_heads, group, n, dim]; group * n is at least 8.
        keys_values: keys and values of each block, fp32 [documents * kv_heads, width, dim] each; width is tiles.KEYS
            but in the last block, where it is a multiple of tiles.ROWS. The values are finite everywhere.
        hidden: block -> bool [1 or documents, 1, 1, n, width], True where a row does not see a key; blocks of which
            every row sees every key may be left out.

    Returns:
        Like ``q``. Keys that a row does not see have the weight zero and change no bit.
    """
    b, group, n, dim = q.shape
    rows = q.reshape(b, group * n, dim)
    scores = [torch.bmm(rows, keys.transpose(1, 2)).mul_(scale) for keys, _ in keys_values]
    for j, mask in hidden.items():
        scores[j].view(documents, -1, group, n, mask.shape[-1]).masked_fill_(mask, float("-inf"))
    weights = torch.softmax(scores[0] if len(scores) == 1 else torch.cat(scores, 2), dim=-1).split(tiles.KEYS, dim=2)
    out = torch.bmm(weights[0], keys_values[0][1])
    for part, (_, values) in zip(weights[1:], keys_values[1:], strict=True):
        out += torch.bmm(part, values)
    return out.view(q.shape)
