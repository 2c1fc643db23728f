"""The Mamba-2 scan over packed documents: the arithmetic of chunk.py, with the states moved from chunk to chunk."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels.mamba import chunk, gradients
from megatron_rlzero.kernels.mamba.buffers import Buffers, buffers
from megatron_rlzero.kernels.mamba.layout import Segment, batches, together


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    lengths: list[int],
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial: Tensor | None = None,
) -> Tensor:
    """h_t = exp(A dt_t) h_{t-1} + dt_t x_t B_t^T, y_t = h_t C_t + D x_t (Dao and Gu, Mamba-2, 2024).

    Args:
        x: [tokens, H, P], documents one after the other; P and N are multiples of tiles.WIDTH.
        dt: [tokens, H], before ``dt_bias``, softplus and the clamp to ``dt_limit``.
        A, D, dt_bias: fp32 [H]; A is negative.
        B, C: [tokens, G, N]; a group serves H / G neighbouring heads.
        lengths: tokens of each document, in order; every document starts at position 0 of its sequence.
        initial: fp32 [documents, H, P, N], the state before each document; None for zeros.

    Returns:
        [tokens, H, P], dtype of ``x``; fp32 inside, rounded once.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.

    A group's values and gradients do not depend on the other groups, nor a document's on the other documents: a rank
    may hold any whole groups. Gradients of A, D and dt_bias are added over the tokens by ``row_sum``. The backward pass
    computes everything again from the inputs and some of the states; memory is linear in the tokens.
    """
    chunk.check(x, dt, A, B, C, D, dt_bias, lengths)
    return _Scan.apply(x, dt, A, B, C, D, dt_bias, lengths, dt_limit, initial)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, dt_bias, lengths, dt_limit, initial):
        boundaries: list[Tensor] | None = [] if any(ctx.needs_input_grad) else None
        y = run(x, chunk.time_steps(dt, dt_bias, dt_limit), A, B, C, D, lengths, initial, boundaries=boundaries)
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, *(boundaries or ()))
        ctx.settings = (lengths, dt_limit, initial is not None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *grads, grad_initial = gradients.gradients(*ctx.saved_tensors[:7], *ctx.settings, ctx.saved_tensors[7:], grad)
        return *grads, None, None, grad_initial


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
    """The value of ``scan`` for time steps fp32 [tokens, H].

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
        torch.bmm(C_, state.transpose(1, 2), out=part)
        if documents:
            before, *move = chunk.first(documents * g, state, *move)
            chunk.move(before, *move, out=before)
    mixed = chunk.between(L, held).mul_(chunk.scores(C, B)[:, None])
    by_head = chunk.by_head(x, held("by head", k, g, j, c, P), dt).view(n, j, c, P)
    y = chunk.outputs(by_head, mixed, read, chunk.decay(L), held("product", n, j, c, P))
    segment.add(out, y.view(x.shape), x, D)
