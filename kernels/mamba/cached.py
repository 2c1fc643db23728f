"""Torch's form of the scan of new tokens, from the state at each last chunk boundary and the partial chunk."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import chunk, reference
from megatron_rlzero.kernels.product.reference import batched


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


@lru_cache(maxsize=8)
def blocks(H: int, P: int, G: int, N: int, dtype: torch.dtype) -> list[tuple]:
    """Shape, strides and dtype of a block of each tensor of a cache."""
    c, fp32 = tiles.CHUNK, torch.float32
    shapes = (((H, P, N), fp32), ((c, H, P), dtype), ((c, H), fp32), ((c, G, N), dtype))
    return [(shape, torch.empty(shape, device="meta").stride(), kind) for shape, kind in shapes]


def check(cache: Cache, x: Tensor, B: Tensor) -> None:
    """What kernels that address a cache by block and row rely on."""
    expected = blocks(*x.shape[1:], *B.shape[1:], x.dtype)
    for name, t, (shape, strides, dtype) in zip(("state", "x", "dt", "B"), cache[:4], expected, strict=True):
        spread = t.stride()[1:] != strides and not t[0].is_contiguous()
        if t.shape[1:] != shape or spread or t.dtype != dtype or t.device != x.device:
            raise ValueError(
                f"{name} of the cache is {t.dtype} {tuple(t.shape)} with strides {t.stride()} on {t.device}; expected "
                f"is {dtype} [blocks, {', '.join(map(str, shape))}] on {x.device}, every block contiguous"
            )


def scan_cached(
    inputs: Sequence[Tensor], lengths: list[int], starts: list[int], cache: Cache, limit: tuple[float, float]
) -> Tensor:
    """See ``dispatch.scan_cached``, for its first seven arguments."""
    x, dt, A, B, C, D, dt_bias = inputs
    dt = chunk.time_steps(dt, dt_bias, limit)
    if max(lengths) == 1:
        return _newest(x, dt, A, B, C, D, starts, cache)
    return _chunks(x, dt, A, B, C, D, lengths, starts, cache)


class _Places(NamedTuple):
    """Of one new token of each sequence, what all layers have in common.

    Attributes:
        row: int64 [sequences], its row in its chunk; beyond: bool [sequences, c, 1], the rows behind it.
        fresh: bool [sequences, 1, 1, 1], whether this is the first chunk; None if nowhere.
        full: int64 [n], the sequences whose chunk is whole with this token; None if there are none.
    """

    row: Tensor
    beyond: Tensor
    fresh: Tensor | None
    full: Tensor | None


@lru_cache(maxsize=8)
def _places(starts: tuple[int, ...], device: torch.device) -> _Places:
    c = tiles.CHUNK
    rows, fresh = [start % c for start in starts], [start < c for start in starts]
    row, full = torch.tensor(rows, device=device), [i for i, row in enumerate(rows) if row == c - 1]
    return _Places(
        row,
        chunk.later(c, 1.0, device).bool().index_select(0, row)[..., None],
        torch.tensor(fresh, device=device)[:, None, None, None] if any(fresh) else None,
        torch.tensor(full, device=device) if full else None,
    )


def _newest(x, dt, A, B, C, D, starts, cache: Cache) -> Tensor:
    """One token each: its row, in every row of a tile, against its chunk."""
    slots, places = cache.slots, _places(tuple(starts), x.device)
    for old, new in ((cache.x, x), (cache.dt, dt), (cache.B, B)):
        old[slots, places.row] = new
    xs, dts, Bs = (old.index_select(0, slots).float() for old in (cache.x, cache.dt, cache.B))
    for t in (xs, Bs):
        t.masked_fill_(places.beyond[..., None], 0)
    dts, L = chunk.decays(dts, A, places.beyond)
    state = cache.state.index_select(0, slots)
    if places.fresh is not None:
        state.masked_fill_(places.fresh, 0)
    (n, H, P), (G, N) = x.shape, B.shape[1:]
    j, c, rows = H // G, tiles.CHUNK, tiles.MAMBA_ROWS
    Bs = Bs.transpose(1, 2).reshape(n * G, c, N)
    tile = C.float().reshape(n * G, 1, N).expand(-1, rows, -1).contiguous()
    read = batched(tile, state.view(n * G, j * P, N).transpose(1, 2))
    # Beyond the newest token L stays, which is that of the end; before the first it is zero.
    to_end = chunk.decay(L[:, -1:] - pad(L, (0, 0, 1, 0)))
    whole, to_end = to_end[:, 0], to_end[:, 1:]
    mixed = to_end.transpose(1, 2).reshape(n * G, j, 1, c) * chunk.scores(tile, Bs)[:, None]
    by_head = chunk.by_head(xs, xs.new_empty(n, H, c, P), dts).view(n * G, j, c, P)
    y = chunk.product(mixed, by_head, xs.new_empty(n * G, j, rows, P))[:, :, 0].reshape(x.shape)
    y = torch.addcmul(y, read[:, 0].reshape(x.shape), whole[..., None]).addcmul_(x.float(), D[:, None])
    if (full := places.full) is not None:
        weighted = xs[full].mul_((to_end[full] * dts[full])[..., None]).flatten(2)
        weighted = weighted.transpose(1, 2).reshape(len(full) * G, j * P, c)
        state = state[full]
        moving, kept = state.view(len(weighted), j * P, N), whole[full].repeat_interleave(P, 1)
        chunk.move(moving, kept.view(*moving.shape[:2], 1), weighted, Bs.view(n, G, c, N)[full].flatten(0, 1), moving)
        cache.state.index_copy_(0, slots[full], state)
    return y.to(x.dtype)


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
