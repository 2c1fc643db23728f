"""Operators that look back, attention, convolution and scan, as the learner packs them, with their float64 formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.attention import attention
from megatron_rlzero.kernels.conv1d import causal_conv1d
from megatron_rlzero.kernels.mamba import scan
from tools.gpu_check.case import Operator
from tools.gpu_check.sizes import SIZES, randn

S = SIZES
WIDTH = 4
#: of the time steps
LIMIT = (0.02, 1.0)


@dataclass(frozen=True)
class Packed:
    """An operator over documents.

    Attributes:
        call: of inputs and the documents' lengths; oracle: the same in float64.
        inputs: of documents of ``lengths``; tokens: which of them have a row per token.
        roundings: as of ``Operator``.
    """

    call: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    tokens: Sequence[int]
    lengths: Sequence[int]
    roundings: int = 1

    def operator(self) -> Operator:
        """Of the inputs alone, without rows."""
        lengths = list(self.lengths)
        call, oracle = (lambda *t, f=f: f(*t, lengths) for f in (self.call, self.oracle))
        return Operator(call, oracle, self.inputs, roundings=self.roundings)


def packed(name: str, dtype: torch.dtype) -> Packed:
    """attention | conv1d | mamba."""
    return {"attention": _attention, "conv1d": _conv, "mamba": _scan}[name](dtype)


def _attention(dtype: torch.dtype) -> Packed:
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        return attention(q, k, v, lengths, S.dim**-0.5)

    def oracle(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        out = []
        for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            b, c = (x.repeat_interleave(S.heads // S.kv_heads, 1) for x in (b, c))
            scores = torch.einsum("qhd,khd->hqk", a, b) * S.dim**-0.5
            future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), c))
        return torch.cat(out)

    heads = (S.heads, S.kv_heads, S.kv_heads)
    inputs = [randn(sum(S.documents), h, S.dim, dtype=dtype) for h in heads]
    # weights and scores' gradients are rounded for products, and both sums start from the rounded result
    return Packed(call, oracle, inputs, (0, 1, 2), S.documents, roundings=3)


def _conv(dtype: torch.dtype) -> Packed:
    def oracle(x: Tensor, weight: Tensor, bias: Tensor, lengths: list[int]) -> Tensor:
        out = []
        for part in x.split(lengths):
            rows = F.pad(part, (0, 0, WIDTH - 1, 0))
            out.append(bias + sum(rows[k : k + len(part)] * weight[:, k] for k in range(WIDTH)))
        return F.silu(torch.cat(out))

    shapes = ((sum(S.scanned), S.channels), (S.channels, WIDTH), (S.channels,))
    return Packed(causal_conv1d, oracle, [randn(*shape, dtype=dtype) for shape in shapes], (0,), S.scanned)


def _scan(dtype: torch.dtype) -> Packed:
    def call(*inputs: Tensor | list[int]) -> Tensor:
        return scan(*inputs, LIMIT)

    def oracle(x, dt, A, B, C, D, bias, lengths) -> Tensor:
        steps, out = F.softplus(dt + bias).clamp(*LIMIT), []
        B, C = (t.repeat_interleave(x.shape[1] // B.shape[1], 1) for t in (B, C))
        for parts in zip(*(t.split(lengths) for t in (x, steps, B, C)), strict=True):
            h = x.new_zeros(*x.shape[1:], B.shape[2])
            for x_t, step, B_t, C_t in zip(*parts, strict=True):
                kept = (A * step).exp()[:, None, None] * h
                h = kept + (step[:, None] * x_t)[..., None] * B_t[:, None]
                out.append((h * C_t[:, None]).sum(-1) + D[:, None] * x_t)
        return torch.stack(out)

    (H, P, G, N), tokens = S.scan, sum(S.scanned)
    shapes = ((tokens, H, P), (tokens, H), (tokens, G, N), (tokens, G, N))
    x, dt, B, C = (randn(*shape, dtype=dtype) for shape in shapes)
    A, D, bias = -randn(H).abs() * 4 - 0.1, randn(H), randn(H) - 2
    return Packed(call, oracle, [x, dt, A, B, C, D, bias], (0, 1, 3, 4), S.scanned)
