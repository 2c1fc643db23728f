"""Causal attention of new tokens over a paged cache, with the arithmetic of ``reference.attend``.

A token's result is the same bits whether its sequence comes as one prefill, in chunks, or token by token, and whatever
else is in the batch.
"""

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.attention.reference import attend, by_kv_head, by_token


def write_cache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stores the keys and values of new tokens.

    Args:
        key, value: [tokens, kv_heads, dim].
        k_cache, v_cache: [blocks, kv_heads, block size, dim], written in place.
        slots: int64 [tokens]: block * block size + place in it; negative for tokens that are not stored.
    """
    stored = slots >= 0
    block, place = slots[stored] // k_cache.shape[2], slots[stored] % k_cache.shape[2]
    k_cache[block, :, place] = key[: len(slots)][stored].to(k_cache.dtype)
    v_cache[block, :, place] = value[: len(slots)][stored].to(v_cache.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_lengths: list[int],
    lengths: list[int],
    scale: float,
) -> Tensor:
    """Attention of each sequence's newest tokens over all of it.

    Args:
        q: [tokens, heads, dim], the new tokens of sequence 0, then of sequence 1, ...
        k_cache, v_cache: [blocks, kv_heads, block size, dim]; the new tokens are in them.
        block_table: int [sequences, blocks of the longest], block numbers.
        query_lengths: new tokens of each sequence; they sum to ``tokens``.
        lengths: tokens of each sequence, the new ones included.

    Returns:
        [tokens, heads, dim], dtype of ``q``. What lies in the cache beyond a sequence's end has no influence.
    """
    heads = q.shape[1]
    kv_heads, block_size = k_cache.shape[1:3]
    # Rows of one KV head's product: enough for the library's many-row code, whatever the batch.
    least = -(-8 // (heads // kv_heads))
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (new, length) in enumerate(zip(query_lengths, lengths, strict=True)):
        if new:
            rows = least if new <= least else tiles.round_up(new, tiles.ROWS)
            groups.setdefault((rows, tiles.round_up(length, tiles.KEYS)), []).append(i)
    starts = torch.tensor([0, *query_lengths]).cumsum(0).tolist()
    out = torch.empty_like(q)
    for (rows, keys), members in groups.items():
        end = torch.tensor([lengths[i] for i in members], device=q.device)[:, None]
        new = torch.tensor([query_lengths[i] for i in members], device=q.device)[:, None]
        start = torch.tensor([starts[i] for i in members], device=q.device)[:, None]
        offset = torch.arange(rows, device=q.device)
        index = start + torch.minimum(offset, new - 1)  # beyond the new tokens the last one again
        positions = end - new + torch.minimum(offset, new - 1)
        blocks = block_table[members, : -(-keys // block_size)].long()
        inside = torch.arange(keys, device=q.device) < end
        k, v = (_pages(cache, blocks, keys) for cache in (k_cache, v_cache))
        v = torch.where(inside.repeat_interleave(kv_heads, 0)[..., None], v, 0.0)  # 0 * NaN is NaN
        result = [
            attend(chunk, k, v, where.repeat_interleave(kv_heads, 0), scale)
            for chunk, where in zip(
                by_kv_head(q[index], kv_heads).split(tiles.QUERIES, 2), positions.split(tiles.QUERIES, 1), strict=True
            )
        ]
        real = offset < new
        out[index[real]] = by_token(torch.cat(result, 2), len(members))[real].to(q.dtype)
    return out


def _pages(cache: Tensor, blocks: Tensor, keys: int) -> Tensor:
    """fp32 [sequences * kv_heads, keys, dim] of the first ``keys`` places in ``blocks`` [sequences, n]."""
    pages = cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :keys].float()  # [sequences, kv_heads, places, dim]
    if pages.shape[2] < keys:
        pages = torch.nn.functional.pad(pages, (0, 0, 0, keys - pages.shape[2]))
    return pages.flatten(0, 1)
