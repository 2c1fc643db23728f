"""The Mamba-2 scan over packed documents: the arithmetic of chunk.py, with the states moved from chunk to chunk."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels.mamba import chunk, gradients
from megatron_rlzero.kernels.mamba.layout import batches


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
        boundaries: list[Tensor] = []
        y = run(x, chunk.time_steps(dt, dt_bias, dt_limit), A, B, C, D, lengths, initial, boundaries=boundaries)
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias, *boundaries)
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
    for group in range(G):
        heads = slice(group * j, group * j + j)
        inputs = tuple(chunk.wide(t) for t in (x[:, heads], B[:, group], C[:, group], steps[:, heads]))
        for batch in batches(lengths, j * P * N, x.device):
            shape = (len(batch.order), j, P, N)
            state = A.new_zeros(shape) if initial is None else initial[batch.order, heads]
            for segment in batch.segments:
                if boundaries is not None:
                    boundaries.append(state)
                xs, Bs, Cs, dt = (segment.take(t) for t in inputs)
                dt, L = chunk.decays(dt, A[heads], segment.padding)
                new, kept = chunk.states(xs, Bs, chunk.to_end(L) * dt), chunk.over_chunk(L)
                entering, state = chunk.move(state, new, kept, segment.counts)
                mixed = chunk.between(L).mul_(chunk.by_source(dt)).mul_(chunk.scores(Cs, Bs)[:, None])
                y = chunk.outputs(xs.transpose(1, 2).contiguous(), Cs, mixed, chunk.decay(L), entering)
                segment.place(out[:, heads], y.addcmul_(xs, D[heads, None]))
                if final is not None:
                    i = segment.last
                    whole = torch.addcmul(new[i], entering[i], kept[i])
                    final[batch.order[segment.ends], heads] = torch.where(segment.partial, entering[i], whole)
    return out
