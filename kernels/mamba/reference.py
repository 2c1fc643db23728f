"""Torch's form of the scan over packed documents: the arithmetic of chunk.py, states moved from chunk to chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rlzero.kernels.mamba import chunk
from megatron_rlzero.kernels.mamba.buffers import Buffers, buffers
from megatron_rlzero.kernels.mamba.layout import Segment, batches, together
from megatron_rlzero.kernels.product.reference import batched


def scan(
    inputs: Sequence[Tensor], lengths: list[int], limit: tuple[float, float], initial: Tensor | None, save: bool
) -> tuple[Tensor, list[Tensor]]:
    """The value of ``dispatch.scan`` for its first seven arguments, and, to be saved, what ``gradients`` needs."""
    x, dt, A, B, C, D, dt_bias = inputs
    boundaries: list[Tensor] = []
    steps = chunk.time_steps(dt, dt_bias, limit)
    return run(x, steps, A, B, C, D, lengths, initial, boundaries=boundaries if save else None), boundaries


def run(
    x: Tensor,
    steps: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    lengths: list[int],
    initial: Tensor | None,
    final: Tensor | None = None,
    boundaries: list[Tensor] | None = None,
) -> Tensor:
    """The value for time steps fp32 [tokens, H].

    ``final`` [documents, H, P, N] is filled with the states at the documents' last chunk boundaries; ``boundaries``
    gets the states before every segment.
    """
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    j = H // G
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    held = buffers(x.device)
    for groups in together(G, j * P * N):
        heads, g = slice(groups.start * j, groups.stop * j), groups.stop - groups.start
        x_, steps_, out_ = (t[:, heads].unflatten(1, (g, j)) for t in (x, steps, out))
        inputs = {"x": x_, "B": B[:, groups], "C": C[:, groups], "steps": steps_}
        rates, skip = A[heads].view(g, 1, j), D[heads].view(g, 1, j, 1)
        for batch in batches(lengths, g * j * P * N, x.device):
            shape = (len(batch.order), g * j, P, N)
            state = A.new_zeros(shape) if initial is None else initial[batch.order, heads]
            moving = state.view(len(batch.order) * g, j * P, N)
            for segment in batch.segments:
                if boundaries is not None:
                    boundaries.append(moving[: segment.counts[0] * g].clone())
                moved = segment.going if final is None else segment.whole
                _segment(segment, moved, moving, inputs, rates, skip, out_, held)
            if final is not None:
                final[batch.order, heads] = state
    return out


def _segment(
    segment: Segment,
    moved: tuple[int, ...],
    state: Tensor,
    inputs: dict[str, Tensor],
    A: Tensor,
    D: Tensor,
    out: Tensor,
    held: Buffers,
) -> None:
    """Writes y of a segment.

    Args:
        moved: of each step, the documents whose states move on, the first ones.
        state: [documents * groups, j P, N], overwritten.
        inputs, out: [tokens, groups, ...]; A, D: [groups, 1, j], [groups, 1, j, 1].
    """
    x, B, C, steps = (segment.take(t, held, name) for name, t in inputs.items())
    (k, g, c, j, P), n = x.shape, x.shape[0] * x.shape[1]
    B, C = (t.reshape(n, c, -1) for t in (B, C))
    dt, L = chunk.decays(steps, A, segment.padding[:, None])
    L = L.view(n, c, j)
    weights = chunk.to_end(L).view_as(dt).mul_(dt)[..., None]
    weighted = torch.mul(x, weights, out=held("weighted", *x.shape)).view(n, c, -1).transpose(1, 2)
    read = held("read", n, c, j * P)
    sizes = [count * g for count in segment.counts]
    parts = zip(moved, *(t.split(sizes) for t in (read, C, chunk.over_chunk(L, P), weighted, B)), strict=True)
    for documents, part, C_, *move in parts:
        state = state if len(state) == len(C_) else state[: len(C_)]
        batched(C_, state.transpose(1, 2), out=part)
        if documents:
            before, *move = chunk.first(documents * g, state, *move)
            chunk.move(before, *move, out=before)
    mixed = chunk.between(L, held).mul_(chunk.scores(C, B)[:, None])
    by_head = chunk.by_head(x, held("by head", k, g, j, c, P), dt).view(n, j, c, P)
    y = chunk.outputs(by_head, mixed, read, chunk.decay(L), held("product", n, j, c, P))
    segment.add(out, y.view(x.shape), x, D)
