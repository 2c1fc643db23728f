"""Experts as learner and engine call them, in the form of the device."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.experts import reference


def grouped_linear(x: Tensor, weights: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Rows of expert e times the weight of expert e.

    Args:
        x: [sum(rows), K], sorted by expert.
        weights: [N, K] each, one per local expert.
        rows: how many rows each expert has.

    Returns:
        [sum(rows), N], the bits of ``linear`` on an expert's rows. An expert without rows gets a zero gradient.
    """
    if not backend.triton(x):
        return reference.grouped_linear(x, weights, rows)
    if len(weights) != len(rows):
        raise ValueError(f"{len(weights)} experts and {len(rows)} numbers of rows")
    if sum(rows) != len(x):
        raise RuntimeError(f"experts have {sum(rows)} rows in all, and x has {len(x)}")
    return _GroupedLinear.apply(x, rows, *weights)


def mlp(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, gated: bool = True) -> Tensor:
    """Every token through its experts, without gradients, by the bits of ``grouped_linear``.

    Args:
        x: [tokens, H].
        experts: int64 [tokens, k], numbers of experts among those of ``w13``; -1 for one that is elsewhere.
        w13: [E, 2 I, H], gate above up, or [E, I, H] if not gated; w2: [E, H, I].
        gated: SwiGLU, or else a squared ReLU between the two.

    Returns:
        [tokens, k, H], zeros for experts that are elsewhere.

    Triton's form waits for nothing on the host, and its launches depend on the shapes alone.
    """
    return _form(x).mlp(x, experts, w13, w2, gated)


def permute(x: Tensor, slots: Tensor) -> Tensor:
    """Each token's row once for each of its experts, in the order of ``slots``.

    Args:
        x: [tokens, H].
        slots: int64 [tokens, k], the result's row of each token and expert, in ascending expert id; every row once.

    Returns:
        [tokens * k, H]. The gradient of a token is the sum of its rows', as ``combine`` adds them.
    """
    return _Permute.apply(x, slots)


def unpermute(rows: Tensor, slots: Tensor) -> Tensor:
    """[tokens * k, H] in the order of ``slots`` -> [tokens, k, H]; see ``permute``."""
    return _Unpermute.apply(rows, slots)


def combine(outputs: Tensor, probabilities: Tensor) -> Tensor:
    """sum_k p_k y_k, added in ascending expert id, in fp32, rounded once.

    Args:
        outputs: [tokens, k, H], slots in ascending expert id.
        probabilities: fp32 [tokens, k].

    Returns:
        [tokens, H], dtype of ``outputs``.
    """
    if not backend.triton(outputs):
        return reference.combine(outputs, probabilities)
    return _Combine.apply(outputs, probabilities)


def _form(x: Tensor) -> ModuleType:
    if not backend.triton(x):
        return reference
    from megatron_rlzero.kernels.experts import triton

    return triton


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.rows = rows
        return _form(x).grouped_linear(x, weights, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        to_x, to_weights = _form(x).grouped_gradients(x, weights, ctx.rows, grad)
        return to_x, None, *to_weights


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots):
        ctx.save_for_backward(slots)
        return x.index_select(0, _order(slots) // slots.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        rows = grad.index_select(0, slots.flatten()).unflatten(0, slots.shape)
        return _form(grad).combine(rows, torch.ones(slots.shape, device=slots.device)), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, slots):
        ctx.save_for_backward(slots)
        return rows.index_select(0, slots.flatten()).unflatten(0, slots.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.flatten(0, 1).index_select(0, _order(*ctx.saved_tensors)), None


def _order(slots: Tensor) -> Tensor:
    """int64 [tokens * k]: which token and expert, counted along ``slots``, each row belongs to."""
    pairs = torch.arange(slots.numel(), device=slots.device)
    return torch.empty_like(pairs).scatter_(0, slots.flatten(), pairs)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, probabilities):
        ctx.save_for_backward(outputs, probabilities)
        return _form(outputs).combine(outputs, probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _form(grad).combine_gradients(*ctx.saved_tensors, grad)
