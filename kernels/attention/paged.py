"""Torch's form of causal attention of new tokens over a paged cache, with the arithmetic of ``reference.attend``.

A token's result is the same bits whether its sequence comes as one prefill, in chunks, or token by token, and whatever
else is in the batch. What the layers of a step have in common is worked out once, by ``plan``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention.reference import attend, by_kv_head, by_token

#: Elements of keys and values that are gathered at one time; bounds the memory and changes no bit.
GATHERED = 2**21


@dataclass(frozen=True)
class Rows:
    """Query rows of a few sequences, the same number of each, with the key blocks that they see.

    Attributes:
        source: int64 [sequences, rows], tokens of the batch; beyond a sequence's new tokens its last one again.
        result, target: int64 [n], the real ones among sequences * rows, and their places in the batch.
        hidden: block -> bool [sequences, 1, 1, rows, keys], True where a row does not see a key; blocks of which every
            row sees every key are left out.
        keys: how many keys some row sees, in whole blocks but for the last one.
    """

    source: Tensor
    result: Tensor
    target: Tensor
    hidden: dict[int, Tensor]
    keys: int


@dataclass(frozen=True)
class Batch:
    """Sequences that are computed together.

    Attributes:
        pages: int64 [sequences * kv_heads * blocks], pages of the cache, those of one head of a sequence in order.
        width: keys that are used, a multiple of tiles.ROWS. The values beyond would have the weight zero, and come last
            in their sum.
    """

    sequences: int
    pages: Tensor
    width: int
    rows: list[Rows]


@dataclass(frozen=True)
class Plan:
    """What the layers of a step have in common.

    Attributes:
        fresh: int64 [n], pages that are written for the first time.
        written: int64 [n], new tokens that are stored; places: int64 [2 * kv_heads * n], rows of the cache for their
            keys, then for their values.
    """

    fresh: Tensor
    written: Tensor
    places: Tensor
    batches: list[Batch]


def plan(
    block_table: Tensor,
    slots: Tensor,
    query_lengths: list[int],
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
) -> Plan:
    """See ``dispatch.plan``."""
    device, tokens = block_table.device, sum(query_lengths)
    head = torch.arange(kv_heads, device=device)
    slots = slots[:tokens]
    written = (slots >= 0).nonzero()[:, 0]
    block, place = slots[written] // tiles.KEYS, slots[written] % tiles.KEYS
    page = block[:, None] * kv_heads + head
    places = torch.cat([((2 * page + i) * tiles.KEYS + place[:, None]).flatten() for i in (0, 1)])
    fresh = page[place == 0].flatten()

    # Rows of one KV head's product: enough for the library's many-row code, whatever the batch.
    least = -(-8 // (heads // kv_heads))
    groups: dict[tuple[int, int], list[int]] = {}
    starts, start = [], 0
    for i, (new, length) in enumerate(zip(query_lengths, lengths, strict=True)):
        starts.append(start)
        start += new
        if new:
            rows = least if new <= least else tiles.round_up(new, tiles.ROWS)
            groups.setdefault((rows, -(-length // tiles.KEYS)), []).append(i)
    batches = []
    for (rows, blocks), members in groups.items():
        members.sort(key=lambda i: lengths[i])
        step = max(GATHERED // (2 * blocks * tiles.KEYS * kv_heads * dim), 1)
        for first in range(0, len(members), step):
            some = members[first : first + step]
            numbers = torch.tensor([[lengths[i], query_lengths[i], starts[i]] for i in some], device=device)
            table = block_table[some, :blocks].long()
            pages = (table[:, None, :] * kv_heads + head[:, None]).flatten()
            width = tiles.round_up(lengths[some[-1]], tiles.ROWS)
            lowest = min(lengths[i] - query_lengths[i] for i in some)
            parts = _rows(*numbers.T[:, :, None], rows, width, lowest)
            batches.append(Batch(len(some), pages, width, parts))
    return Plan(fresh, written, places, batches)


def _rows(end: Tensor, new: Tensor, start: Tensor, rows: int, keys: int, lowest: int) -> list[Rows]:
    """``end``, ``new``, ``start``: int64 [sequences, 1]; ``lowest``: position of the first row that comes first."""
    key = torch.arange(keys, device=end.device).split(tiles.KEYS)
    offset = torch.arange(rows, device=end.device)
    real, at = offset < new, torch.minimum(offset, new - 1)
    source, positions = start + at, end - new + at
    parts = []
    for first in range(0, rows, tiles.QUERIES):
        part = slice(first, first + tiles.QUERIES)
        seen = len(key) if rows <= tiles.QUERIES else int(positions[:, part].max()) // tiles.KEYS + 1
        hidden = {
            j: (key[j] > positions[:, part, None])[:, None, None]
            for j in range((lowest + first + 1) // tiles.KEYS, seen)
        }
        result = real[:, part].flatten().nonzero()[:, 0]
        target, width = source[:, part].flatten()[result], min(seen * tiles.KEYS, keys)
        parts.append(Rows(source[:, part], result, target, hidden, width))
    return parts


def paged_attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """See ``dispatch.paged_attention``."""
    kv_heads, dim = k.shape[1:]
    rows_of_cache, cache = cache.view(-1, dim), cache.flatten(0, 1)
    # A page begins as zeros: values beyond a sequence's end get the weight zero, but 0 * NaN is NaN.
    cache.index_fill_(0, plan.fresh, 0.0)
    rows_of_cache.index_copy_(0, plan.places, torch.cat((k[plan.written], v[plan.written])).view(-1, dim))
    out = torch.empty_like(q)
    for batch in plan.batches:
        keys, values = (
            cache[:, i].index_select(0, batch.pages).view(batch.sequences * kv_heads, -1, dim)[:, : batch.width].float()
            for i in (0, 1)
        )
        for rows in batch.rows:
            queries, seen = by_kv_head(q[rows.source], kv_heads), slice(rows.keys)
            result = attend(queries, keys[:, seen], values[:, seen], rows.hidden, batch.sequences, scale)
            result = by_token(result, batch.sequences).flatten(0, 1)
            out.index_copy_(0, rows.target, result.index_select(0, rows.result).to(q.dtype))
    return out
