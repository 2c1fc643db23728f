"""The rotation as learner and engine call it, in the form of the device."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rlzero.kernels import backend
from megatron_rlzero.kernels.rotary import reference


def apply_rotary(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotates the halves of every head (the layout of Hugging Face checkpoints, not the interleaved one).

    Args:
        x: [tokens, heads, dim].
        table: what ``rotary_table`` returns.
        positions: int64 [tokens], position of each token in its own document.

    Returns:
        Like ``x``; computed in fp32 and rounded once.
    """
    return _Rotary.apply(x, table, positions) if backend.triton(x) else reference.apply_rotary(x, table, positions)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, positions):
        from megatron_rlzero.kernels.rotary import triton

        ctx.save_for_backward(table, positions)
        return triton.rotate(x, table, positions, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from megatron_rlzero.kernels.rotary import triton

        return triton.rotate(grad, *ctx.saved_tensors, back=True), None, None
