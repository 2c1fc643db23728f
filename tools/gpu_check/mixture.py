"""Operators of a mixture of experts: gate, choice, the experts of engine and learner, the sum of what they give."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.experts import combine, grouped_linear, mlp, permute, unpermute
from megatron_rlzero.kernels.router import gate, top_k
from tools.gpu_check.case import Call, Operator, row_before, split
from tools.gpu_check.dense import product
from tools.gpu_check.sizes import DEVICE, SIZES, randn

S = SIZES


def operators() -> Iterator[tuple[str, str, Callable[[torch.dtype], Operator]]]:
    """As ``dense.operators``."""
    yield "router", "gate", _gate
    yield "router", "top-k of a softmax", _softmax_top_k
    yield "router", "top-k of sigmoids", _sigmoid_top_k
    yield "experts", "experts with SwiGLU", partial(_mlp, gated=True)
    yield "experts", "experts with a squared ReLU", partial(_mlp, gated=False)
    yield "experts", "grouped linear", _grouped
    yield "experts", "permute", _permute
    yield "experts", "combine", _combine


def _gate(dtype: torch.dtype) -> Operator:
    def library(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    inputs = [randn(S.rows, S.hidden, dtype=dtype), randn(S.experts, S.hidden, dtype=dtype)]
    return Operator(gate, product, inputs, [0], split(gate), torchs=("F.linear in fp32", library))


def chosen(scores: Tensor, k: int) -> Tensor:
    """The ``k`` largest of each row, of equal ones the lowest ids, in ascending id."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k].sort(-1).values


def _logits() -> Tensor:
    """Multiples of 1/64, many of them equal: what is larger in fp32 is larger in float64."""
    return (randn(S.rows, S.experts, scale=2.0) * 64).round() / 64


def _softmax_top_k(dtype: torch.dtype) -> Operator:
    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return top_k(logits, S.top, renormalise=True)

    def oracle(logits: Tensor) -> Tensor:
        p = logits.softmax(-1).gather(1, chosen(logits, S.top))
        return p / p.sum(-1, keepdim=True)

    return _choice(choose, oracle)


def _sigmoid_top_k(dtype: torch.dtype) -> Operator:
    bias = (randn(S.experts, scale=0.1) * 64).round() / 64

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        return top_k(logits, S.top - 2, True, 2.5, True, bias, groups=4, group_top_k=2)

    def oracle(logits: Tensor) -> Tensor:
        scores = logits.sigmoid()
        grouped = (scores + bias).detach().unflatten(1, (4, -1))
        kept = chosen(grouped.topk(2).values.sum(-1), 2)
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, kept, False)
        choice = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
        p = scores.gather(1, chosen(choice, S.top - 2))
        return p / p.sum(-1, keepdim=True) * 2.5

    return _choice(choose, oracle)


def _choice(choose: Callable[[Tensor], tuple[Tensor, Tensor]], oracle: Callable[[Tensor], Tensor]) -> Operator:
    def bits(logits: Tensor) -> Tensor:
        return torch.cat(choose(logits), 1)  # ids as numbers

    return Operator(lambda x: choose(x)[0], oracle, [_logits()], [0], row_before(bits, [0]), bits)


def _mlp(dtype: torch.dtype, gated: bool) -> Operator:
    """A sixteenth of the choices is an expert that is elsewhere."""
    width = 2 * S.width if gated else S.relu

    def call(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return mlp(x, experts, w13, w2, gated)

    def oracle(x: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        out = x.new_zeros(*experts.shape, x.shape[1])
        for expert in range(len(w13)):
            token, slot = (experts == expert).nonzero(as_tuple=True)
            hidden = x[token] @ w13[expert].T
            hidden = F.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1] if gated else F.relu(hidden).square()
            out[token, slot] = hidden @ w2[expert].T
        return out

    experts = torch.randint(0, S.stored, (S.rows, S.top), device=DEVICE)
    experts[torch.rand(experts.shape, device=DEVICE) < 1 / 16] = -1
    shapes = ((S.stored, width, S.hidden), (S.stored, S.hidden, width // 2 if gated else width))
    weights = [randn(*shape, dtype=dtype, scale=shape[2] ** -0.5) for shape in shapes]
    inputs = [randn(S.rows, S.hidden, dtype=dtype), experts, *weights]
    return Operator(call, oracle, inputs, [0, 1], row_before(call, [0, 1]), roundings=3, differentiable=False)


def _grouped(dtype: torch.dtype) -> Operator:
    """Rows of any expert, sorted for the operator; one expert has none."""

    def sorted_by_expert(x: Tensor, experts: Tensor, weights: tuple[Tensor, ...], call: Call) -> Tensor:
        order = experts.argsort(stable=True)
        y = call(x[order], weights, torch.bincount(experts, minlength=len(weights)).tolist())
        return y[order.argsort()]

    def grouped(x: Tensor, experts: Tensor, *weights: Tensor) -> Tensor:
        return sorted_by_expert(x, experts, weights, grouped_linear)

    def cut(x: Tensor, experts: Tensor, *weights: Tensor) -> Tensor:
        """Two sums that are rounded apart."""
        parts = slice(0, S.hidden // 4), slice(S.hidden // 4, S.hidden)
        first, second = (grouped(x[:, part], experts, *(w[:, part] for w in weights)) for part in parts)
        return first + second

    def oracle(x: Tensor, experts: Tensor, *weights: Tensor) -> Tensor:
        out = x.new_zeros(len(x), S.width)
        for expert, weight in enumerate(weights):
            rows = (experts == expert).nonzero()[:, 0]
            out = out.index_put((rows,), product(x[rows], weight))
        return out

    weights = [randn(S.width, S.hidden, dtype=dtype) for _ in range(5)]
    experts = torch.randint(0, 4, (S.rows,), device=DEVICE)
    experts[experts == 2] = 4
    return Operator(grouped, oracle, [randn(S.rows, S.hidden, dtype=dtype), experts, *weights], [0, 1], cut)


def _permute(dtype: torch.dtype) -> Operator:
    """Both ways: what comes back is every token's row for each of its experts."""
    slots = torch.randperm(S.rows * S.top, device=DEVICE).view(S.rows, S.top)

    def call(x: Tensor, factors: Tensor) -> Tensor:
        return unpermute(permute(x, slots) * factors, slots)

    def oracle(x: Tensor, factors: Tensor) -> Tensor:
        return x[:, None] * factors[slots]

    # powers of two: a product with one is exact
    factors = (2.0 ** torch.randint(-2, 3, (S.rows * S.top, 1), device=DEVICE)).to(dtype)
    return Operator(call, oracle, [randn(S.rows, S.hidden, dtype=dtype), factors])


def _combine(dtype: torch.dtype) -> Operator:
    def oracle(outputs: Tensor, probabilities: Tensor) -> Tensor:
        return torch.einsum("tkh,tk->th", outputs, probabilities)

    def cut(outputs: Tensor, probabilities: Tensor) -> Tensor:
        """Two sums that are rounded apart, the last slots first."""
        middle = S.top // 2
        return combine(outputs[:, middle:], probabilities[:, middle:]) + combine(
            outputs[:, :middle], probabilities[:, :middle]
        )

    inputs = [randn(S.rows, S.top, S.hidden, dtype=dtype), torch.rand(S.rows, S.top, device=DEVICE)]
    return Operator(combine, oracle, inputs, [0, 1], cut)
