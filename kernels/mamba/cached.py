"""The Mamba-2 scan of new tokens of sequences, from the state at their last chunk boundary and the partial chunk."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import chunk, reference


class Cache(NamedTuple):
    """What a sequence leaves in its block; it is stale, and may be anything, where the sequence has not been.

    The tensors may be views of one memory with any stride from block to block, as in vLLM's pages: they are written and
    read by block and row, never flattened.

    Attributes:
        state: fp32 [blocks, H, P, N], at the last boundary of tiles.CHUNK tokens; stale in a sequence's first chunk.
        x: [blocks, tiles.CHUNK, H, P], dt: fp32 [blocks, tiles.CHUNK, H] after softplus and clamp, and
            B: [blocks, tiles.CHUNK, G, N]: the tokens since that boundary; stale beyond the newest one.
        slots: int64 [sequences], the block of each sequence of the batch.

    The first dimension of a tensor may have any stride: blocks of several tensors may lie in one page.
    """

    state: Tensor
    x: Tensor
    dt: Tensor
    B: Tensor
    slots: Tensor


def scan_cached(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    lengths: list[int],
    starts: list[int],
    cache: Cache,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """y of ``scan`` for the new tokens of each sequence, without gradients; writes the cache.

    Args:
        x, dt, A, B, C, D, dt_bias, dt_limit: as in ``scan``.
        lengths: new tokens of each sequence, in the order of x.
        starts: position of each sequence's first new token.

    Returns:
        [tokens, H, P], the bits that ``scan`` gives the whole sequence, however it is cut into calls and batched.

    A batch of one new token each goes through products of tiles.MAMBA_ROWS rows: callers pass such sequences apart.
    """
    chunk.check(x, dt, A, B, C, D, dt_bias, lengths)
    if not len(lengths) == len(starts) == len(cache.slots):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts and {len(cache.slots)} slots")
    with torch.no_grad():
        dt = chunk.time_steps(dt, dt_bias, dt_limit)
        if max(lengths) == 1:
            return _newest(x, dt, A, B, C, D, starts, cache)
        return _chunks(x, dt, A, B, C, D, lengths, starts, cache)


class _Places(NamedTuple):
    """Of one new token of each sequence, what all layers have in common.

    Attributes:
        row: int64 [sequences], its row in its chunk; upto: int64 [sequences, c], the rows up to it, and then it again.
        beyond: bool [sequences, c, 1], the rows behind it.
        fresh: bool [sequences, 1, 1, 1], whether this is the first chunk; None if nowhere.
        full: int64 [n], the sequences whose chunk is whole with this token; None if there are none.
    """

    row: Tensor
    upto: Tensor
    beyond: Tensor
    fresh: Tensor | None
    full: Tensor | None


@lru_cache(maxsize=8)
def _places(starts: tuple[int, ...], device: torch.device) -> _Places:
    c, position = tiles.CHUNK, torch.tensor(starts, device=device)
    row, offset = position % c, torch.arange(c, device=device)
    fresh, full = position < c, (row == c - 1).nonzero()[:, 0]
    return _Places(
        row,
        torch.minimum(offset, row[:, None]),
        (offset > row[:, None])[..., None],
        fresh[:, None, None, None] if fresh.any() else None,
        full if len(full) else None,
    )


def _newest(x, dt, A, B, C, D, starts, cache: Cache) -> Tensor:
    """One token each: its row, in every row of a tile, against its chunk."""
    n, slots, places = len(x), cache.slots, _places(tuple(starts), x.device)
    for old, new in ((cache.x, x), (cache.dt, dt), (cache.B, B)):
        old[slots, places.row] = new
    # Beyond the newest token stands it again, with a time step of zero.
    xs, dts, Bs = (old[slots[:, None], places.upto].float() for old in (cache.x, cache.dt, cache.B))
    dts, L = chunk.decays(dts, A, places.beyond)
    state = cache.state.index_select(0, slots)
    if places.fresh is not None:
        state.masked_fill_(places.fresh, 0)
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    by_head = xs.transpose(1, 2).contiguous().view(n * G, H // G, -1, P)
    Bs, weights = Bs.transpose(1, 2).reshape(n * G, -1, N), chunk.to_end(L).mul_(dts)
    tile = C.float().reshape(n * G, 1, N).repeat(1, tiles.MAMBA_ROWS, 1)
    scores = chunk.scores(tile, Bs)
    mixed = chunk.by_source(weights).view(n * G, H // G, 1, -1) * scores[:, None]
    decay = chunk.decay(L[:, -1])
    y = chunk.outputs(by_head, tile, mixed, decay.view(n * G, 1, -1), state.view(n * G, -1, P, N))[:, 0]
    y = y.reshape(x.shape).addcmul_(x.float(), D[:, None])
    if (full := places.full) is not None:
        xs, weights = (_by_group(t[full], G) for t in (xs, weights))
        new = chunk.states(xs, Bs.view(n, G, -1, N)[full].flatten(0, 1), weights).view(-1, H, P, N)
        cache.state.index_copy_(0, slots[full], torch.addcmul(new, state[full], decay[full][..., None, None]))
    return y.to(x.dtype)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[n, c, H, ...] -> [n * groups, c, H / groups, ...]."""
    return x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _chunks(x, dt, A, B, C, D, lengths, starts, cache: Cache) -> Tensor:
    """Any number of tokens each: the partial chunk from the cache, and the new tokens behind it, as documents."""
    c, slots, device = tiles.CHUNK, cache.slots, x.device
    begin, length = torch.tensor(starts, device=device), torch.tensor(lengths, device=device)
    past = begin % c
    whole = past + length
    offset = torch.arange(int(whole.max()), device=device)
    real = offset < whole[:, None]
    # Rows of [rows of the sequences' blocks, new tokens] of every sequence from its boundary on.
    old_rows = len(slots) * c
    block = torch.arange(len(slots), device=device)[:, None] * c
    first = old_rows + length.cumsum(0) - length - past
    source = torch.where(offset < past[:, None], block + offset, first[:, None] + offset)[real]
    xs, dts, Bs = (
        torch.cat((old[slots].flatten(0, 1), new.to(old.dtype)))[source]
        for old, new in ((cache.x, x), (cache.dt, dt), (cache.B, B))
    )
    Cs = torch.cat((C.new_zeros(1, *C.shape[1:]), C))[(source - old_rows + 1).clamp(min=0)]
    state = cache.state[slots].masked_fill_((begin < c)[:, None, None, None], 0)
    after = torch.empty_like(state)
    documents = whole.tolist()
    y = reference.run(xs, dts, A, Bs, Cs, D, documents, state, final=after)
    cache.state[slots] = after
    kept = (offset >= whole[:, None] // c * c) & real
    kept_rows = kept[real]
    to = (slots[:, None].expand(kept.shape)[kept], (offset % c).expand(kept.shape)[kept])
    for old, new in ((cache.x, xs), (cache.dt, dts), (cache.B, Bs)):
        old[to] = new[kept_rows]
    return y[(offset >= past[:, None])[real]]
