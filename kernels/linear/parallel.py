"""Column- and row-parallel linear whose results and gradients do not depend on the tensor-parallel size.

What contracts over a split dimension (the output of a row-parallel layer, the input gradient of a column-parallel one)
is the sum over a fixed number of slices by kernels/reduction; everything else is local and independent of the split.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rlzero.kernels.linear.dispatch import linear, weight_gradient
from megatron_rlzero.kernels.reduction import all_reduce, gather, reduce_scatter, row_sum, sliced_product


def column_parallel(
    x: Tensor,
    weight: Tensor,
    slices: int,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    blocks: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Tensor:
    """y = x W^T + b with the rows of W, and b, split over ``group``.

    Args:
        x: [tokens, K], or [tokens / ranks, K] with sequence parallelism.
        weight: [N / ranks, K].
        slices: of the whole N, a multiple of the number of ranks; order of the sum in the gradient of ``x``.
        blocks: of the weight's rows on this rank, see ``sliced_product``.
        bias: [N / ranks] or None, added as ``linear`` adds it. Its gradient is the sum over the tokens by ``tree``.

    Returns:
        [tokens, N / ranks].
    """
    return _Column.apply(x, weight, bias, slices, group, sequence_parallel, blocks)


def row_parallel(
    x: Tensor, weight: Tensor, slices: int, group: ProcessGroup | None = None, sequence_parallel: bool = False
) -> Tensor:
    """y = x W^T with the columns of W, and those of x, split over ``group``.

    Args:
        x: [tokens, K / ranks].
        weight: [N, K / ranks].
        slices: of the whole K, a multiple of the number of ranks; the order of the sum.

    Returns:
        [tokens, N], or [tokens / ranks, N] with sequence parallelism; rounded once.
    """
    return _Row.apply(x, weight, slices, group, sequence_parallel)


def replicated(x: Tensor, weight: Tensor, rows: ProcessGroup | None = None) -> Tensor:
    """y = x W^T with the whole W on every rank.

    Args:
        x: [tokens, K].
        weight: [N, K].
        rows: ranks over which the tokens are split. The gradient of ``weight`` is the whole one on every rank.

    Returns:
        [tokens, N].
    """
    return _Replicated.apply(x, weight, rows)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, slices, group, sequence_parallel, blocks):
        ctx.save_for_backward(x, weight)
        ctx.layout = (_mine(slices, group), group, sequence_parallel, blocks, bias is not None)
        return linear(gather(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        slices, group, sequence_parallel, blocks, biased = ctx.layout
        root = sliced_product(grad, weight, slices, blocks)
        grad_x = (reduce_scatter if sequence_parallel else all_reduce)(root, group).to(x.dtype)
        grad_weight = weight_gradient(grad, gather(x, group) if sequence_parallel else x)
        grad_bias = row_sum(grad).to(grad.dtype) if biased else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, slices, group, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.layout = (group, sequence_parallel)
        root = sliced_product(x, weight.T, _mine(slices, group))
        return (reduce_scatter if sequence_parallel else all_reduce)(root, group).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        group, sequence_parallel = ctx.layout
        grad = gather(grad, group) if sequence_parallel else grad
        return linear(grad, weight.T), weight_gradient(grad, x), None, None, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = weight_gradient(gather(grad, ctx.rows), gather(x, ctx.rows))
        return linear(grad, weight.T), grad_weight, None


def _mine(slices: int, group: ProcessGroup | None) -> int:
    ranks = 1 if group is None else dist.get_world_size(group)
    if slices % ranks:
        raise ValueError(f"{slices} slices do not divide over {ranks} tensor-parallel ranks")
    return slices // ranks
