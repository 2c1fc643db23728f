"""Torch's gradients of the scan: segments are computed again, from the last one back.

Notation as in chunk.py; V_s is the gradient of dt_s x_s. The gradient of A dt_t is added up from the terms that contain
it, and not as a difference of sums over L, which would lose what the gradients of A and dt_bias are made of.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.mamba import chunk
from megatron_rlzero.kernels.mamba.buffers import Buffers, buffers
from megatron_rlzero.kernels.mamba.layout import Segment, batches, together
from megatron_rlzero.kernels.reduction import tree


def gradients(
    inputs: Sequence[Tensor],
    lengths: list[int],
    limit: tuple[float, float],
    initial: Tensor | None,
    saved: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, of every token's time step, A and D, of B, of C, and of the initial states.

    Args:
        inputs: the first seven arguments of ``dispatch.scan``.
        saved: the states before every segment, in the order of ``reference.run``.
        grad: like x.

    Returns:
        x, B and C in their dtypes; fp32 [tokens, H, 3]; fp32 [documents, H, P, N] or None.
    """
    x, dt, A, B, C, D, dt_bias = inputs
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    j, done = H // G, 0
    steps = chunk.time_steps(dt, dt_bias, limit)
    to_x, to_B, to_C = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, B, C))
    tokens = torch.empty(*steps.shape, 3, device=x.device)
    held = buffers(x.device)
    to_initial = None if initial is None else torch.empty_like(initial, memory_format=torch.contiguous_format)
    for groups in together(G, j * P * N):
        heads, g = slice(groups.start * j, groups.stop * j), groups.stop - groups.start
        x_, dy_, steps_, to_x_, tokens_ = (t[:, heads].unflatten(1, (g, j)) for t in (x, grad, steps, to_x, tokens))
        read = {"x": x_, "B": B[:, groups], "C": C[:, groups], "dy": dy_, "steps": steps_}
        outputs = (to_x_, tokens_, to_B[:, groups], to_C[:, groups])
        rates, skip = A[heads].view(g, 1, j), D[heads].view(g, 1, j, 1)
        for batch in batches(lengths, g * j * P * N, x.device):
            before, behind = saved[done : done + len(batch.segments)], A.new_zeros(len(batch.order) * g, j * P, N)
            for segment, state in zip(reversed(batch.segments), reversed(before), strict=True):
                _segment(segment, state, behind, read, rates, skip, outputs, held)
            done += len(batch.segments)
            if to_initial is not None:
                to_initial[batch.order, heads] = behind.view(-1, g * j, P, N)
    return to_x, tokens, to_B, to_C, to_initial


def _segment(
    segment: Segment,
    state: Tensor,
    behind: Tensor,
    inputs: dict[str, Tensor],
    A: Tensor,
    D: Tensor,
    outputs: tuple[Tensor, ...],
    held: Buffers,
) -> None:
    """Writes the gradients of a segment.

    Args:
        state: [documents * groups, j P, N], before the segment.
        behind: [documents * groups, j P, N], gradients of the states behind it, zero for documents that do not go on;
            overwritten with those of the states before it.
        inputs, outputs: [tokens, groups, ...]; A, D: [groups, 1, j], [groups, 1, j, 1].
    """
    to_x, to_tokens, to_B, to_C = outputs
    x, B, C, dy, steps = (segment.take(t, held, name) for name, t in inputs.items())
    (k, g, c, j, P), n = x.shape, x.shape[0] * x.shape[1]
    B, C = (t.reshape(n, c, -1) for t in (B, C))
    if segment.real is not None:
        dy = dy.masked_fill(segment.padding[:, None, ..., None], 0)
    dt, L = (t.view(n, c, j) for t in chunk.decays(steps, A, segment.padding[:, None]))
    to_end, kept, from_start = chunk.to_end(L), chunk.over_chunk(L, P), chunk.decay(L)
    weights = to_end * dt
    weighted, d_read = (
        torch.mul(t, factor.view(k, g, c, j, 1), out=held(name, *x.shape)).view(n, c, -1)
        for name, t, factor in (("weighted", x, weights), ("d_read", dy, from_start))
    )
    read, through, V_state, d_B, d_C = _states(segment, state, behind, kept, weighted, d_read, B, C, held)
    lost = torch.mul(x, V_state.view(x.shape), out=weighted.view(x.shape)).sum(-1).view(n, c, j)
    d_log = read.mul_(d_read).view(n, c, j, P).sum(-1).flip(1).cumsum(1).flip(1)
    d_log += tiles.halving_sum(through.mul_(kept[..., 0]).view(n, j, P))[:, None]
    d_log += pad((lost * weights)[:, :-1], (0, 0, 1, 0)).cumsum(1)

    # y = exp(L) C . state + mixed (dt x) + D x
    scores, decay, dt_by_source = chunk.scores(C, B)[:, None], chunk.between(L, held), chunk.by_source(dt)
    x_by_head, dy_by_head = (
        chunk.by_head(t, held(name, k, g, j, c, P)).view(n, j, c, P) for name, t in (("read", x), ("d_read", dy))
    )
    d_scores = chunk.product(dy_by_head, x_by_head.transpose(2, 3), held("d_scores", n, j, c, c))
    to_D = d_scores.diagonal(dim1=2, dim2=3).transpose(1, 2).contiguous()
    mixed = torch.mul(decay, scores, out=held("mixed", n, j, c, c))
    passing = torch.mul(mixed, d_scores, out=held("passing", n, j, c, c))
    to_steps = torch.addcmul(passing.sum(2).transpose(1, 2), lost, to_end)
    V = chunk.product(mixed.mul_(dt_by_source).transpose(2, 3), dy_by_head, out=x_by_head).transpose(1, 2)
    d_scores = tree(d_scores.mul_(decay.mul_(dt_by_source)), dim=1)
    d_B.baddbmm_(d_scores.transpose(1, 2), C)
    d_C.baddbmm_(d_scores, B)

    # A dt_t is in exp(L_u - L_s) for s < t <= u: sums over s, then over u.
    later = chunk.later(tiles.CHUNK, 1.0, x.device)
    passing = torch.mm(passing.mul_(dt_by_source).flatten(0, 2), later, out=held("mixed", n * j * c, c))
    d_log += passing.view(decay.shape).mul_(1 - later).sum(2).transpose(1, 2)

    V_state = V_state.view(n, c, j, P)
    V = torch.addcmul(V, V_state, weights[..., None], out=V_state).view(x.shape)
    to_steps = to_steps.view(k, g, c, j).addcmul_(d_log.view(k, g, c, j), A)
    per_token = (to_steps, (d_log * dt).view_as(to_steps), to_D.view_as(to_steps))
    segment.place(to_tokens, torch.stack(per_token, dim=-1))
    segment.add(to_x, V, dy, D)
    segment.place(to_B, d_B.view(k, g, c, -1))
    segment.place(to_C, d_C.view(k, g, c, -1))


def _states(
    segment: Segment,
    state: Tensor,
    behind: Tensor,
    kept: Tensor,
    weighted: Tensor,
    d_read: Tensor,
    B: Tensor,
    C: Tensor,
    held: Buffers,
) -> tuple[Tensor, ...]:
    """Moves the states of a segment forward again, and their gradients back.

    Args:
        state, behind: as in ``_segment``.
        kept: [n, j P, 1]; weighted, d_read: [n, c, j P]; B, C: [n, c, N], as in ``chunk``.

    Returns:
        read [n, c, j P]; through, gradients of ``kept`` [n, j P]; gradients by the states of x_s / exp(L_last - L_s)
        [n, c, j P], and of B and C [n, c, N].
    """
    g = len(state) // segment.counts[0]
    sizes = [count * g for count in segment.counts]
    entering, through = held("entering", *kept.shape[:2], B.shape[2]), held("through", *kept.shape[:2])
    read, V, d_B, d_C = (held(i, *t.shape) for i, t in (("read", weighted), ("V", weighted), ("d_B", B), ("d_C", C)))
    steps = list(zip(*(t.split(sizes) for t in (entering, kept, weighted.transpose(1, 2), B)), strict=True))
    steps[0][0].copy_(state)
    for step, (after, *_) in pairwise(steps):
        chunk.move(*chunk.first(len(after), *step), out=after)
    arrays = (C, entering, d_read, d_read.transpose(1, 2), kept, B, weighted, read, V, d_B, d_C, through)
    steps = list(zip(segment.going, *(t.split(sizes) for t in arrays), strict=True))
    for going, C_, before, d_read_, by_channel, kept_, B_, weighted_, read_, V_, d_B_, d_C_, through_ in steps[::-1]:
        torch.bmm(C_, before.transpose(1, 2), out=read_)
        torch.bmm(d_read_, before, out=d_C_)
        after = behind if len(behind) == len(C_) else behind[: len(C_)]
        if n := going * g:
            before, behind_, B_, weighted_, *out = chunk.first(n, before, after, B_, weighted_, V_, d_B_, through_)
            torch.bmm(B_, behind_.transpose(1, 2), out=out[0])
            torch.bmm(weighted_, behind_, out=out[1])
            torch.sum(before.mul_(behind_), dim=-1, out=out[2])
        if n < len(C_):
            for t in (V_, d_B_, through_):
                t[n:].zero_()
        chunk.move(after, kept_, by_channel, C_, out=after)
    return read, through, V, d_B, d_C
