"""The scan as learner and engine call it, in the form that kernels/backend.py chose."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.activation import softplus
from megatron_rlzero.kernels.mamba import cached, chunk, gradients, native, reference
from megatron_rlzero.kernels.mamba.cached import Cache
from megatron_rlzero.kernels.reduction import row_sum


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
    if initial is not None:
        shape = (len(lengths), *x.shape[1:], B.shape[2])
        if initial.shape != shape or initial.dtype != torch.float32:
            raise ValueError(f"initial states {initial.dtype} {tuple(initial.shape)}; expected are fp32 {shape}")
    return _Scan.apply(x, dt, A, B, C, D, dt_bias, initial, lengths, dt_limit)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, dt_bias, initial, lengths, dt_limit):
        inputs = (x, dt, A, B, C, D, dt_bias)
        form = native if backend.native(x) else reference
        y, saved = form.scan(inputs, lengths, dt_limit, initial, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, initial, *saved)
        ctx.settings = (lengths, dt_limit)
        ctx.gradients = native.gradients if form is native else gradients.gradients
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *inputs, initial = ctx.saved_tensors[:8]
        found = ctx.gradients(inputs, *ctx.settings, initial, ctx.saved_tensors[8:], grad)
        to_x, to_tokens, to_B, to_C, to_initial = found
        (_, dt, *_, dt_bias), (_, dt_limit) = inputs, ctx.settings
        to_steps, to_A, to_D = to_tokens.unbind(-1)
        raw = dt.float() + dt_bias
        steps = softplus(raw)
        # exp overflows below -88, where the derivative is 0
        to_raw = torch.where(steps.clamp(*dt_limit).eq(steps), to_steps / (1 + (-raw).exp()), 0)
        to_A, to_D, to_bias = (row_sum(t) for t in (to_A, to_D, to_raw))
        return to_x, to_raw.to(dt.dtype), to_A, to_B, to_C, to_D, to_bias, to_initial, None, None


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

    Torch's form takes a batch of one new token each through products of tiles.MAMBA_ROWS rows: callers pass such
    sequences apart.
    """
    chunk.check(x, dt, A, B, C, D, dt_bias, lengths)
    if not len(lengths) == len(starts) == len(cache.slots):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts and {len(cache.slots)} slots")
    form = native if backend.native(x) else cached
    with torch.no_grad():
        return form.scan_cached((x, dt, A, B, C, D, dt_bias), lengths, starts, cache, dt_limit)
