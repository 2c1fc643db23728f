"""The convolution as learner and engine call it, in the form of the device."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.conv1d import reference


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], initial: Tensor | None = None
) -> Tensor:
    """y_t = silu(b + sum_k w_k x_{t - width + 1 + k}), the convolution of Gu and Dao, Mamba, 2023.

    Args:
        x: [tokens, channels], documents one after the other.
        weight: [channels, width].
        bias: [channels] or None.
        lengths: tokens of each document, in order; they sum to ``tokens``.
        initial: [documents, width - 1, channels], the inputs before each document, dtype of ``x``; None for zeros.

    Returns:
        Like ``x``. Bias and terms are added in fp32 from k = 0 on, each sum and product rounded; rounded once to the
        dtype of ``x``.

    Raises:
        ValueError: lengths or initial do not fit ``x``.

    A document in any number of calls, each with the last inputs of the one before, gives the bits of one call.
    Gradients of weight and bias are added over the tokens by ``row_sum``.
    """
    _check(x, lengths, initial, weight.shape[1])
    return _CausalConv1d.apply(x, weight, bias, lengths, initial)


def causal_conv1d_cached(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """``causal_conv1d`` of the new tokens of each sequence, without gradients; the inputs before them are in a cache.

    Args:
        x: [tokens, channels], new tokens of the sequences one after the other.
        weight, bias: as in ``causal_conv1d``.
        bounds: int32 [sequences + 1], where each sequence's new tokens begin, and at last where they end.
        positions: int32 [sequences], tokens before a sequence's first new one; its block is stale where there are none.
        state: [blocks, width - 1, channels], dtype of ``x``, with any strides of the first two dimensions: the last
            inputs of each sequence, zeros before its first one; overwritten with those that the new tokens leave.
        slots: int64 [sequences], the block of each.

    Returns:
        Like ``x``, the bits that ``causal_conv1d`` gives the whole sequence, however it is cut into calls and batched;
        zeros for rows beyond the last sequence.

    Raises:
        ValueError: shapes or dtypes do not fit.

    A sequence without new tokens leaves its block as it is, whatever its slot and position. On a GPU nothing is read
    back, and launches depend on shapes alone.
    """
    wanted = (weight.shape[1] - 1, x.shape[1])
    if tuple(state.shape[1:]) != wanted or state.dtype != x.dtype:
        raise ValueError(f"state {tuple(state.shape)} {state.dtype}; expected is [blocks, *{wanted}] {x.dtype}")
    if not len(bounds) - 1 == len(positions) == len(slots):
        raise ValueError(f"{len(bounds)} bounds, {len(positions)} positions and {len(slots)} slots")
    with torch.no_grad():
        return _form(x).causal_conv1d_cached(x, weight, bias, bounds, positions, state, slots)


def _check(x: Tensor, lengths: list[int], initial: Tensor | None, width: int) -> None:
    if sum(lengths) != len(x):
        raise ValueError(f"documents of {sum(lengths)} tokens in all for {len(x)} rows of x")
    wanted = (len(lengths), width - 1, x.shape[1])
    if initial is not None and (tuple(initial.shape) != wanted or initial.dtype != x.dtype):
        raise ValueError(f"initial {tuple(initial.shape)} {initial.dtype}; expected is {wanted} {x.dtype}")


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.conv1d import triton

    return triton


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, lengths, initial):
        ctx.save_for_backward(x, weight, bias, initial)
        ctx.lengths = lengths
        return _form(x).causal_conv1d(x, weight, bias, lengths, initial)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, initial = ctx.saved_tensors
        to_x, to_weight, to_bias, to_initial = _form(x).gradients(x, weight, bias, ctx.lengths, initial, grad)
        return to_x, to_weight, to_bias, None, to_initial
