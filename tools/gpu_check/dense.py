"""Operators of every layer: linear, norms, activations, rotary embedding, vocabulary, sums over slices."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.activation import silu_and_mul, squared_relu
from megatron_rlzero.kernels.linear import column_parallel, linear, row_parallel
from megatron_rlzero.kernels.log_prob import log_prob, log_softmax
from megatron_rlzero.kernels.norm import gated_group_norm, rms_norm
from megatron_rlzero.kernels.reduction import row_sum, tree
from megatron_rlzero.kernels.rotary import apply_rotary, rotary_table
from tools.gpu_check.case import Call, Operator, row_before, split
from tools.gpu_check.sizes import BF16, DEVICE, SIZES, randn

EPS, BASE, TEMPERATURE = 1e-6, 1e6, 0.7
S = SIZES


def operators() -> Iterator[tuple[str, str, Callable[[torch.dtype], Operator]]]:
    """Folder in kernels/, name, and what makes the operator for a dtype."""
    yield "linear", "linear", _linear
    yield "linear", "linear with bias", partial(_linear, biased=True)
    yield "linear", "row-parallel linear", partial(_sliced, call=row_parallel)
    yield "linear", "column-parallel linear", partial(_sliced, call=column_parallel)
    yield "norm", "RMSNorm", partial(_norm, shape=(S.hidden,))
    yield "norm", "RMSNorm of heads", partial(_norm, shape=(S.heads, S.dim))
    yield "norm", "gated group norm", _gated_norm
    yield "activation", "silu and multiply", _silu_and_mul
    yield "activation", "squared ReLU", _squared_relu
    yield "rotary", "rotary", _rotary
    yield "log_prob", "log-probability", _log_prob
    yield "log_prob", "entropy", partial(_log_prob, entropy=True)
    yield "log_prob", "log-softmax", _log_softmax
    yield "reduction", "tree of slices", _tree
    yield "reduction", "sum over rows", _row_sum


def product(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    return torch.einsum("...k,nk->...n", x, weight) + bias


def _linear(dtype: torch.dtype, biased: bool = False) -> Operator:
    inputs = [randn(S.rows, S.hidden, dtype=dtype), randn(S.out, S.hidden, dtype=dtype)]
    inputs += [randn(S.out, dtype=dtype)] * biased
    return Operator(linear, product, inputs, [0], split(linear), torchs=("F.linear", F.linear))


def _sliced(dtype: torch.dtype, call: Callable[..., Tensor]) -> Operator:
    def sliced(x: Tensor, weight: Tensor) -> Tensor:
        return call(x, weight, S.slices)

    k, n = (S.sliced, S.hidden) if call is row_parallel else (S.hidden, S.sliced)
    inputs = [randn(S.rows, k, dtype=dtype), randn(n, k, dtype=dtype)]
    return Operator(sliced, product, inputs, [0], split(sliced))


def _norm(dtype: torch.dtype, shape: tuple[int, ...]) -> Operator:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        """Squares in another order, and a rounding before the weight."""
        return norm(x.roll(1, -1), torch.ones_like(weight)).roll(-1, -1) * weight

    def library(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, EPS)

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    inputs = [randn(S.rows, *shape, dtype=dtype), (1 + randn(shape[-1], scale=0.1)).to(dtype)]
    return Operator(norm, oracle, inputs, [0], turned, torchs=("F.rms_norm", library))


def _gated_norm(dtype: torch.dtype) -> Operator:
    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return gated_group_norm(x, gate, weight, S.norm_groups, EPS)

    def turned(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Squares of a group in another order, and a rounding before the weight."""
        x, gate = (t.unflatten(1, (S.norm_groups, -1)).roll(1, -1).flatten(1) for t in (x, gate))
        y = norm(x, gate, torch.ones_like(weight)).unflatten(1, (S.norm_groups, -1)).roll(-1, -1)
        return y.flatten(1) * weight

    def oracle(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        z = (x * F.silu(gate)).unflatten(1, (S.norm_groups, -1))
        return (z / (z.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1) * weight

    channels = 2 * S.hidden
    inputs = [randn(S.rows, channels, dtype=dtype), randn(S.rows, channels, dtype=dtype, scale=2.0)]
    return Operator(norm, oracle, [*inputs, (1 + randn(channels, scale=0.1)).to(dtype)], [0, 1], turned)


def _silu_and_mul(dtype: torch.dtype) -> Operator:
    def oracle(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    inputs = [randn(S.rows, 2 * S.width, dtype=dtype, scale=3.0)]
    other = row_before(silu_and_mul, [0])
    return Operator(silu_and_mul, oracle, inputs, [0], other, torchs=("F.silu(gate) * up", oracle))


def _squared_relu(dtype: torch.dtype) -> Operator:
    inputs = [randn(S.rows, S.relu, dtype=dtype)]
    return Operator(squared_relu, lambda x: F.relu(x).square(), inputs, [0], row_before(squared_relu, [0]))


def _rotary(dtype: torch.dtype) -> Operator:
    positions = torch.randint(0, 4096, (S.rows,), device=DEVICE)
    table = rotary_table(4096, S.dim, BASE, DEVICE)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        return apply_rotary(x, table, positions)

    def oracle(x: Tensor, positions: Tensor) -> Tensor:
        frequency = BASE ** (-torch.arange(0, S.dim, 2, dtype=x.dtype, device=DEVICE) / S.dim)
        angle = (positions[:, None].double() * frequency)[:, None]
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    inputs = [randn(S.rows, S.heads, S.dim, dtype=dtype), positions]
    return Operator(rotate, oracle, inputs, [0, 1], row_before(rotate, [0, 1]))


def _log_prob(dtype: torch.dtype, entropy: bool = False) -> Operator:
    """Logits are rounded to the model's dtype on both sides; where those fall beside each other costs a rounding."""

    def both(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return log_prob(hidden, weight, targets, S.vocabulary, TEMPERATURE, S.slices)

    def turned(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Blocks of the vocabulary that begin at another id."""
        targets = (targets + 1) % S.vocabulary
        return torch.stack(both(hidden, weight[: S.vocabulary].roll(1, 0), targets), 1)

    def oracle(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = product(hidden, weight[: S.vocabulary])
        logits = logits + (logits.to(dtype).double() - logits).detach()
        found = (logits / TEMPERATURE).log_softmax(-1)
        return -(found.exp() * found).sum(-1) if entropy else found.gather(1, targets[:, None])[:, 0]

    rows = S.rows if dtype == BF16 else S.rows // 4  # fp32 products take long
    weight = randn(S.padded, S.hidden, dtype=dtype, scale=2 * S.hidden**-0.5)
    inputs = [randn(rows, S.hidden, dtype=dtype), weight]
    targets = torch.randint(0, S.vocabulary, (rows,), device=DEVICE)
    per_row = () if entropy else (0, 2)
    return Operator(
        lambda *t: both(*t)[entropy], oracle, [*inputs, targets], per_row, turned,
        bits=lambda *t: torch.stack(both(*t), 1), roundings=2, differentiable=not entropy,
    )  # fmt: skip


def _log_softmax(dtype: torch.dtype) -> Operator:
    def call(logits: Tensor) -> Tensor:
        return log_softmax(logits, TEMPERATURE)

    def library(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / TEMPERATURE, -1)

    def turned(logits: Tensor) -> Tensor:
        return call(logits.roll(1, 1)).roll(-1, 1)

    inputs = [randn(S.rows, S.vocabulary, dtype=dtype, scale=2.0)]
    oracle: Call = lambda x: (x / TEMPERATURE).log_softmax(-1)  # noqa: E731
    torchs = ("torch.log_softmax", library)
    return Operator(call, oracle, inputs, [0], turned, torchs=torchs, roundings=0, differentiable=False)


def _tree(dtype: torch.dtype) -> Operator:
    """Of slices, which are fp32 whatever the model's dtype."""
    inputs = [randn(S.rows, S.slices, S.hidden)]
    return Operator(
        lambda x: tree(x, 1), lambda x: x.sum(1), inputs, [0], lambda x: tree(x.roll(1, 1), 1), differentiable=False
    )  # fmt: skip


def _row_sum(dtype: torch.dtype) -> Operator:
    """What is a column for ``row_sum`` is a row here: none may depend on the others."""

    def call(x: Tensor) -> Tensor:
        return row_sum(x.T)

    inputs = [randn(S.rows, 9 * S.rows + 5, dtype=dtype)]
    return Operator(
        call, lambda x: x.sum(1), inputs, [0], row_before(call, [0]), roundings=0, differentiable=False
    )  # fmt: skip
