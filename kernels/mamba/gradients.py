"""Gradients of the Mamba-2 scan: segments are computed again, from the last one back.

Notation as in chunk.py; V_s is the gradient of dt_s x_s. The gradient of A dt_t is added up from the terms that contain
it, and not as a difference of sums over L, which would lose what the gradients of A and dt_bias are made of.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import softplus
from megatron_rlzero.kernels.mamba import chunk
from megatron_rlzero.kernels.mamba.layout import Segment, batches
from megatron_rlzero.kernels.reduction import row_sum, tree


def gradients(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    lengths: list[int],
    dt_limit: tuple[float, float],
    initial: bool,
    boundaries: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors, and last that of the initial states or None, each in its dtype.

    Args:
        initial: whether initial states were given.
        boundaries: the states before every segment, in the order of ``reference.run``.
        grad: like x.
    """
    (H, P), (G, N) = x.shape[1:], B.shape[1:]
    j, done = H // G, 0
    steps = chunk.time_steps(dt, dt_bias, dt_limit)
    to_x, to_B, to_C = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, B, C))
    tokens = torch.empty(*steps.shape, 3, device=x.device)  # gradients of the time step, of A and of D
    to_initial = A.new_empty(len(lengths), H, P, N) if initial else None
    for group in range(G):
        heads = slice(group * j, group * j + j)
        inputs = [chunk.wide(t) for t in (x[:, heads], B[:, group], C[:, group], grad[:, heads], steps[:, heads])]
        outputs = (to_x[:, heads], tokens[:, heads], to_B[:, group], to_C[:, group])
        for batch in batches(lengths, j * P * N, x.device):
            before, behind = boundaries[done : done + len(batch.segments)], A.new_empty(0, j, P, N)
            for segment, state in zip(reversed(batch.segments), reversed(before), strict=True):
                behind = _segment(segment, state, behind, inputs, A[heads], D[heads], outputs)
            done += len(batch.segments)
            if to_initial is not None:
                to_initial[batch.order, heads] = behind
    to_steps, to_A, to_D = tokens.unbind(-1)
    raw = dt.float() + dt_bias
    unclamped = steps.eq(softplus(raw))
    to_raw = torch.where(unclamped, to_steps / (1 + (-raw).exp()), 0)  # exp overflows below -88, where this is 0
    sums = [row_sum(t) for t in (to_A, to_D, to_raw)]
    return to_x, to_raw.to(dt.dtype), sums[0], to_B, to_C, sums[1], sums[2], to_initial


def _segment(
    segment: Segment,
    state: Tensor,
    behind: Tensor,
    inputs: list[Tensor],
    A: Tensor,
    D: Tensor,
    outputs: tuple[Tensor, ...],
) -> Tensor:
    """Writes the gradients of a segment of one group; returns those of the states before it.

    Args:
        state: before the segment; behind: the gradient of the states behind it, of the documents that go on.
    """
    to_x, to_tokens, to_B, to_C = outputs
    x, B, C, dy, steps = (segment.take(t) for t in inputs)
    if segment.real is not None:
        dy = dy.masked_fill(segment.padding[..., None], 0)
    dt, L = chunk.decays(steps, A, segment.padding)
    to_end, kept = chunk.to_end(L), chunk.over_chunk(L)
    weighted = x * (to_end * dt)[..., None]
    new = torch.bmm(weighted.flatten(2).transpose(1, 2), B).unflatten(1, x.shape[2:])
    entering, _ = chunk.move(state, new, kept, segment.counts)

    # y = exp(L) C . state + mixed (dt x) + D x
    d_read = (dy * chunk.decay(L)[..., None]).flatten(2)
    ahead = torch.bmm(d_read.transpose(1, 2), C).view(new.shape)
    read = torch.bmm(C, entering.flatten(1, 2).transpose(1, 2))
    d_log = read.mul_(d_read).view(x.shape).sum(-1).flip(1).cumsum(1).flip(1)
    d_C = torch.bmm(d_read, entering.flatten(1, 2))
    scores, decay = chunk.scores(C, B)[:, None], chunk.between(L)
    by_head, dy_by_head = (t.transpose(1, 2).contiguous() for t in (x, dy))
    V = chunk.product((decay * scores).transpose(2, 3), dy_by_head).transpose(1, 2)
    d_scores = chunk.product(dy_by_head, by_head.transpose(2, 3)).mul_(decay.mul_(chunk.by_source(dt)))

    # state' = exp(L_last) state + sum_s exp(L_last - L_s) dt_s x_s B_s^T
    after = new
    parts = zip(*(t.split(segment.counts) for t in (ahead, after, kept)), strict=True)
    for gained, lost, factor in reversed(list(parts)):
        lost[: len(behind)] = behind
        lost[len(behind) :] = 0
        behind = gained.addcmul_(lost, factor)
    flat = after.flatten(1, 2)
    V_state = torch.bmm(B, flat.transpose(1, 2)).view(x.shape).mul_(to_end[..., None])
    d_log += pad(((x * V_state).sum(-1) * dt)[:, :-1], (0, 0, 1, 0)).cumsum(1)
    d_log += (tiles.halving_sum(entering.mul_(after).sum(-1)) * kept[..., 0, 0])[:, None]
    d_B = torch.bmm(weighted.flatten(2), flat)
    V = V_state.add_(V)

    # A dt_t is in exp(L_u - L_s) for s < t <= u: sums over s, then over u.
    later = chunk.later(tiles.CHUNK, 1.0, x.device)
    passing = (d_scores * scores).flatten(0, 2) @ later
    d_log += passing.view(d_scores.shape).mul_(1 - later).sum(2).transpose(1, 2)
    d_scores = tree(d_scores, dim=1)
    d_B.baddbmm_(d_scores.transpose(1, 2), C)
    d_C.baddbmm_(d_scores, B)

    per_token = ((x * V).sum(-1).add_(d_log * A), d_log * dt, (dy * x).sum(-1))
    segment.place(to_tokens, torch.stack(per_token, dim=-1))
    segment.place(to_x, V.mul_(dt[..., None]).addcmul_(dy, D[:, None]))
    segment.place(to_B, d_B)
    segment.place(to_C, d_C)
    return behind
