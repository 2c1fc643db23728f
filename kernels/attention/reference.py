"""Torch's form of causal attention over packed documents, built from products of fixed shape, and its gradients.

A query row sees the scores of all keys up to its own, a softmax over them, and its product with the values in blocks
of tiles.KEYS keys added from left to right. Nothing in that depends on the other documents of the pack.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.product.reference import batched


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """The value of ``dispatch.attention``. Documents of one padded length are batched, which changes no bit."""
    out = torch.empty_like(q)
    for index, real in _batches(lengths, q.device):
        documents, kv_heads = len(index), k.shape[1]
        queries, keys, values = by_kv_head(q[index], kv_heads), *(_by_head(x[index]) for x in (k, v))
        chunks = []
        for first, last in _chunks(queries.shape[2]):
            hidden = _hidden(first, last, q.device)
            chunks.append(attend(queries[:, :, first:last], keys[:, :last], values[:, :last], hidden, documents, scale))
        out[index[real]] = by_token(torch.cat(chunks, dim=2), documents)[real].to(q.dtype)
    return out


def gradients(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype, for ``grad`` like q.

    The weights P of a chunk of tiles.QUERIES queries are computed again, from them dV = P^T dO, dP = dO V^T,
    dS = P (dP - sum(P dP)), dQ = dS K and dK = dS^T Q; the keys' sums over chunks are added from the first chunk on.
    """
    results = tuple(torch.empty_like(x) for x in (q, k, v))
    for index, real in _batches(lengths, q.device):
        documents, kv_heads = len(index), k.shape[1]
        queries, keys, values = by_kv_head(q[index], kv_heads) * scale, *(_by_head(x[index]) for x in (k, v))
        grads = by_kv_head(torch.where(real[..., None, None], grad[index], 0), kv_heads)
        to_q, to_k, to_v = (torch.zeros_like(x) for x in (queries, keys, values))
        for first, last in _chunks(queries.shape[2]):
            rows, d_out = (x[:, :, first:last].flatten(1, 2) for x in (queries, grads))
            seen, part = keys[:, :last], to_q[:, :, first:last]
            weights = _weights(rows, seen, _hidden(first, last, q.device), documents, last - first)
            to_v[:, :last] += torch.bmm(weights.transpose(1, 2), d_out)
            d_scores = torch.bmm(d_out, values[:, :last].transpose(1, 2)).mul_(weights)
            d_scores -= weights.mul_(d_scores.sum(-1, keepdim=True))
            part.copy_(torch.bmm(d_scores, seen).mul_(scale).view(part.shape))
            to_k[:, :last] += torch.bmm(d_scores.transpose(1, 2), rows)
        found = by_token(to_q, documents), *(x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (to_k, to_v))
        for result, x in zip(results, found, strict=True):
            result[index[real]] = x[real].to(result.dtype)
    return results


def _batches(lengths: list[int], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """For the documents of each padded length: token indices [documents, padded], and which of them are real.

    Beyond a document's end stands its last token again, which the causal mask hides from every real query.
    """
    for padded, documents in _by_padded_length(lengths).items():
        offsets = torch.arange(padded, device=device)
        start = torch.tensor([d[0] for d in documents], device=device)[:, None]
        length = torch.tensor([d[1] for d in documents], device=device)[:, None]
        yield start + torch.minimum(offsets, length - 1), offsets < length


def _by_padded_length(lengths: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Length padded to whole row tiles -> (start, length) of the documents that have it."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(accumulate([0, *lengths]), lengths, strict=False):
        if length:
            groups.setdefault(tiles.round_up(length, tiles.ROWS), []).append((start, length))
    return groups


def _chunks(n: int) -> list[tuple[int, int]]:
    """First query and end of each chunk."""
    return [(first, min(first + tiles.QUERIES, n)) for first in range(0, n, tiles.QUERIES)]


def _hidden(first: int, last: int, device: torch.device) -> dict[int, Tensor]:
    """Which keys the queries ``first`` ... ``last`` - 1 of a document do not see, as in ``attend``."""
    position, key = torch.arange(first, last, device=device), torch.arange(last, device=device).split(tiles.KEYS)
    return {j: (key[j] > position[:, None])[None, None, None] for j in range((first + 1) // tiles.KEYS, len(key))}


def _by_head(x: Tensor) -> Tensor:
    """[b, n, kv_heads, dim] -> fp32 [b * kv_heads, n, dim]."""
    return x.float().transpose(1, 2).flatten(0, 1)


def by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """[b, n, heads, dim] -> fp32 [b * kv_heads, heads per KV head, n, dim]: one KV head's queries form one product."""
    return q.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)


def by_token(out: Tensor, b: int) -> Tensor:
    """The inverse of ``by_kv_head``: [b * kv_heads, heads per KV head, n, dim] -> [b, n, heads, dim]."""
    return out.unflatten(0, (b, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, hidden: Mapping[int, Tensor], documents: int, scale: float
) -> Tensor:
    """The one arithmetic of attention: scores of all keys, a softmax over them, values block after block.

    Args:
        q: fp32 [documents * kv_heads, group, n, dim]; group * n is at least 8.
        keys, values: fp32 [documents * kv_heads, width, dim] each; width is a multiple of tiles.ROWS. The values are
            finite everywhere.
        hidden: block -> bool [1 or documents, 1, 1, n, width], True where a row does not see a key; blocks of which
            every row sees every key may be left out.

    Returns:
        Like ``q``. Keys that a row does not see have the weight zero and change no bit.
    """
    b, group, n, dim = q.shape
    weights = _weights((q * scale).reshape(b, group * n, dim), keys, hidden, documents, n)
    out: Tensor | None = None
    for part, block in zip(weights.split(tiles.KEYS, dim=2), values.split(tiles.KEYS, dim=1), strict=True):
        product = batched(part, block)
        out = product if out is None else out.add_(product)
    return out.view(q.shape)


def _weights(rows: Tensor, keys: Tensor, hidden: Mapping[int, Tensor], documents: int, n: int) -> Tensor:
    """Softmax of the scores of scaled ``rows`` [b, group * n, dim]: [b, group * n, width]."""
    scores = batched(rows, keys.transpose(1, 2))
    for j, mask in hidden.items():
        block = scores[:, :, j * tiles.KEYS : (j + 1) * tiles.KEYS]
        block.view(documents, -1, rows.shape[1] // n, n, mask.shape[-1]).masked_fill_(mask, float("-inf"))
    return torch.softmax(scores, dim=-1)
