"""Causal depthwise convolution with silu, as multiply-adds in one order, so that a token has one value everywhere."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels.activation import silu
from megatron_rlzero.kernels.reduction import row_sum


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

    A document in any number of calls, each with the ``conv_state`` of the one before, gives the bits of one call.
    """
    _check(x, lengths, initial, weight.shape[1])
    return _CausalConv1d.apply(x, weight, bias, lengths, initial)


def conv_state(x: Tensor, lengths: list[int], initial: Tensor) -> Tensor:
    """The last inputs of each document, those before it included: ``initial`` for what follows.

    Args:
        x, lengths, initial: as in ``causal_conv1d``; initial is given.

    Returns:
        [documents, width - 1, channels], like ``initial``.
    """
    _check(x, lengths, initial, initial.shape[1] + 1)
    documents, past, channels = initial.shape
    if len(set(lengths)) == 1:
        return torch.cat((initial, x.view(documents, lengths[0], channels)), dim=1)[:, lengths[0] :]
    length = torch.tensor(lengths, device=x.device)[:, None]
    row = torch.arange(past, device=x.device) + length  # among the document's past inputs and its own
    document = torch.arange(documents, device=x.device)[:, None]
    start = documents * past + length.cumsum(0) - length
    source = torch.where(row < past, document * past + row, start + row - past)
    return torch.cat((initial.flatten(0, 1), x))[source]


def _check(x: Tensor, lengths: list[int], initial: Tensor | None, width: int) -> None:
    if sum(lengths) != len(x):
        raise ValueError(f"documents of {sum(lengths)} tokens in all for {len(x)} rows of x")
    wanted = (len(lengths), width - 1, x.shape[1])
    if initial is not None and (tuple(initial.shape) != wanted or initial.dtype != x.dtype):
        raise ValueError(f"initial {tuple(initial.shape)} {initial.dtype}; expected is {wanted} {x.dtype}")


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, lengths, initial):
        ctx.save_for_backward(x, weight, bias, initial)
        ctx.lengths = lengths
        inputs, rows = _with_past(x, lengths, initial, weight.shape[1])
        return _rows(silu(_convolve(inputs, weight, bias)), rows).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, initial = ctx.saved_tensors
        width = weight.shape[1]
        inputs, rows = _with_past(x, ctx.lengths, initial, width)
        summed = _rows(_convolve(inputs, weight, bias), rows)
        sigmoid = 1 / (1 + (-summed).exp())  # exp overflows below -88, where the derivative is 0
        grad = grad.float() * sigmoid * (1 + summed * (1 - sigmoid))
        n = inputs.shape[1] - width + 1
        taps = [_rows(inputs[:, k : k + n], rows) for k in range(width)]
        grad_weight = torch.stack([row_sum(grad * tap) for tap in taps], dim=1).to(weight.dtype)
        grad_bias = None if bias is None else row_sum(grad).to(bias.dtype)
        spread = grad.new_zeros(inputs.shape[0] * n, x.shape[1])
        spread = spread.index_copy_(0, rows, grad) if rows is not None else grad
        spread, grad_inputs = spread.view(inputs.shape[0], n, -1), torch.zeros_like(inputs)
        for k, w in enumerate(weight.float().unbind(1)):
            grad_inputs[:, k : k + n] += spread * w
        grad_x = _rows(grad_inputs[:, width - 1 :], rows).to(x.dtype)
        grad_initial = None
        if initial is not None:
            starts = [start + i * (width - 1) for i, start in enumerate(accumulate([0, *ctx.lengths[:-1]]))]
            first = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width - 1, device=x.device)
            grad_initial = grad_inputs.flatten(0, 1)[first].to(initial.dtype)
        return grad_x, grad_weight, grad_bias, None, grad_initial


def _with_past(x: Tensor, lengths: list[int], initial: Tensor | None, width: int) -> tuple[Tensor, Tensor | None]:
    """Every document with the inputs before it, in fp32, and where its results are.

    Returns:
        [documents, length + width - 1, channels] and None if all documents have one length; or else the documents one
        after the other, [1, tokens + documents * (width - 1), channels], and the tokens' rows among the results.
    """
    documents, past, channels = len(lengths), width - 1, x.shape[1]
    before = x.new_zeros(documents, past, channels) if initial is None else initial
    if len(set(lengths)) == 1:
        return torch.cat((before, x.view(documents, lengths[0], channels)), dim=1).float(), None
    parts = [part for pair in zip(before.unbind(), x.split(lengths), strict=True) for part in pair]
    shift = torch.repeat_interleave(
        torch.arange(documents, device=x.device) * past, torch.tensor(lengths, device=x.device)
    )
    return torch.cat(parts).float()[None], shift + torch.arange(len(x), device=x.device)


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [b, n + width - 1, channels] -> [b, n, channels]: the sum that goes into silu."""
    n = inputs.shape[1] - weight.shape[1] + 1
    shape = (inputs.shape[0], n, inputs.shape[2])
    total = inputs.new_zeros(shape) if bias is None else bias.float().expand(shape)
    for k, w in enumerate(weight.float().unbind(1)):
        total = total + inputs[:, k : k + n] * w
    return total


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """[b, n, channels] -> [tokens, channels]: all rows, or some."""
    x = x.flatten(0, 1)
    return x if rows is None else x[rows]
