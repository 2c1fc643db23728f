"""The scan as learner and engine call it, in the form that kernels/backend.py chose."""

from collections.abc import Callable
from itertools import accumulate
from types import ModuleType

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
        form, ctx.gradients = _forms(x)
        y, saved = form.scan(inputs, lengths, dt_limit, initial, any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, initial, *saved)
        ctx.settings = (lengths, dt_limit)
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

    Torch's form is faster at a batch of one new token each, which goes through products of tiles.MAMBA_ROWS rows.
    """
    chunk.check(x, dt, A, B, C, D, dt_bias, lengths)
    if not len(lengths) == len(starts) == len(cache.slots):
        raise ValueError(f"{len(lengths)} lengths, {len(starts)} starts and {len(cache.slots)} slots")
    inputs = (x, dt, A, B, C, D, dt_bias)
    with torch.no_grad():
        if backend.triton(x):
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=x.device)
            positions = torch.tensor(starts, dtype=torch.int32, device=x.device)
            return _forms(x)[0].scan_cached(inputs, bounds, positions, cache, dt_limit)
        form = native if backend.native(x) else cached
        return form.scan_cached(inputs, lengths, starts, cache, dt_limit)


def scan_cached_at(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    bounds: Tensor,
    positions: Tensor,
    cache: Cache,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """``scan_cached`` with counts that lie where x does; a sequence may have no new tokens.

    Args:
        x, dt, A, B, C, D, dt_bias, cache, dt_limit: as in ``scan_cached``.
        bounds: int32 [sequences + 1], where each sequence's new tokens begin, and at last where they end.
        positions: int32 [sequences], of each sequence's first new token.

    Returns:
        As ``scan_cached``; zeros for rows beyond the last sequence.

    A sequence without new tokens leaves its block as it is, whatever its slot and position. On a GPU nothing is read
    back, and launches depend on shapes alone.
    """
    chunk.check(x, dt, A, B, C, D, dt_bias, None)
    if not len(bounds) - 1 == len(positions) == len(cache.slots):
        raise ValueError(f"{len(bounds)} bounds, {len(positions)} positions and {len(cache.slots)} slots")
    if backend.triton(x):
        with torch.no_grad():
            return _forms(x)[0].scan_cached((x, dt, A, B, C, D, dt_bias), bounds, positions, cache, dt_limit)
    lengths = bounds.diff()
    active, count = lengths > 0, int(bounds[-1])
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if count:
        x, dt, B, C = (t[:count] for t in (x, dt, B, C))
        cache, lengths, starts = cache._replace(slots=cache.slots[active]), lengths[active], positions[active]
        out[:count] = scan_cached(x, dt, A, B, C, D, dt_bias, lengths.tolist(), starts.tolist(), cache, dt_limit)
    return out


def _forms(x: Tensor) -> tuple[ModuleType, Callable[..., tuple[Tensor | None, ...]]]:
    """What has ``scan`` and ``scan_cached``, and ``gradients``."""
    if backend.triton(x):
        from megatron_rlzero.kernels.mamba import triton, triton_backward

        return triton, triton_backward.gradients
    return (native, native.gradients) if backend.native(x) else (reference, gradients.gradients)
