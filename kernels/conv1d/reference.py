"""Torch's form of the convolution: multiply-adds of whole tensors, in one order for a token of any document."""

from itertools import accumulate

import torch
from torch import Tensor

from megatron_rlzero.kernels.activation import silu
from megatron_rlzero.kernels.reduction import row_sum


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], initial: Tensor | None) -> Tensor:
    """See ``dispatch.causal_conv1d``."""
    inputs, rows = _with_past(x, lengths, initial, weight.shape[1])
    return _rows(silu(_convolve(inputs, weight, bias)), rows).to(x.dtype)


def causal_conv1d_cached(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, positions: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """See ``dispatch.causal_conv1d_cached``."""
    active = bounds.diff() > 0
    lengths, slots = bounds.diff()[active].tolist(), slots[active]
    past = torch.where((positions[active] > 0)[:, None, None], state[slots], 0)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if lengths:
        new = x[: sum(lengths)]
        state[slots] = conv_state(new, lengths, past)
        out[: len(new)] = causal_conv1d(new, weight, bias, lengths, past)
    return out


def conv_state(x: Tensor, lengths: list[int], initial: Tensor) -> Tensor:
    """The last inputs of each document, those before it included, like ``initial``: what precedes its next tokens."""
    documents, past, channels = initial.shape
    if len(set(lengths)) == 1:
        return torch.cat((initial, x.view(documents, lengths[0], channels)), dim=1)[:, lengths[0] :]
    length = torch.tensor(lengths, device=x.device)[:, None]
    row = torch.arange(past, device=x.device) + length  # among the document's past inputs and its own
    document = torch.arange(documents, device=x.device)[:, None]
    start = documents * past + length.cumsum(0) - length
    source = torch.where(row < past, document * past + row, start + row - past)
    return torch.cat((initial.flatten(0, 1), x))[source]


def gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], initial: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial, in their dtypes, from ``grad``, like x."""
    width = weight.shape[1]
    inputs, rows = _with_past(x, lengths, initial, width)
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
        starts = [start + i * (width - 1) for i, start in enumerate(accumulate([0, *lengths[:-1]]))]
        first = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width - 1, device=x.device)
        grad_initial = grad_inputs.flatten(0, 1)[first].to(initial.dtype)
    return grad_x, grad_weight, grad_bias, grad_initial


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
