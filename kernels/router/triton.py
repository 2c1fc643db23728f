"""Top-k routing in Triton: a token's scores lie whole in a program; the chosen are added up in ascending expert id."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rlzero.kernels import gpu, tiles
from megatron_rlzero.kernels.activation.triton import sigmoid
from megatron_rlzero.kernels.router.reference import LEAST_TOTAL

_LEAST_TOTAL = tl.constexpr(LEAST_TOTAL)


@triton.jit(do_not_specialize=["tokens"])
def _scores(logits, out, tokens, count, SIGMOID: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    inside = (row[:, None] < tokens) & (expert[None, :] < count)
    at = row.to(tl.int64)[:, None] * count + expert[None, :]
    x = tl.load(logits + at, mask=inside, other=float("-inf"))
    if SIGMOID:
        scores = sigmoid(x)
    else:
        top = tl.max(x, axis=1)
        weights = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None])  # rows beyond the last are empty
        scores = tl.div_rn(weights, tl.broadcast_to(tl.sum(weights, axis=1)[:, None], weights.shape))
    tl.store(out + at, scores, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    choice, scores, probabilities, experts, tokens, count, scaling,
    RENORMALISE: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
    real = row < tokens
    inside = real[:, None] & (expert < count)
    at = row.to(tl.int64)[:, None] * count + expert
    x = tl.load(choice + at, mask=inside, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    left = expert < count + tl.zeros((ROWS, SIZE), dtype=tl.int32)
    chosen = tl.zeros((ROWS, SIZE), dtype=tl.int1)
    for _ in range(TOP):
        best = tl.max(tl.where(left, x, float("-inf")), axis=1)
        lowest = tl.min(tl.where(left & (x == best[:, None]), expert, SIZE), axis=1)
        chosen = chosen | (expert == lowest[:, None])
        left = left & (expert != lowest[:, None])
    values = tl.load(scores + at, mask=inside, other=0.0)
    rest, total, to = chosen, tl.zeros((ROWS,), dtype=tl.float32), row.to(tl.int64) * TOP
    for slot in range(TOP):
        lowest = tl.min(tl.where(rest, expert, SIZE), axis=1)
        mine = expert == lowest[:, None]
        score = tl.sum(tl.where(mine, values, 0.0), axis=1)  # one term and zeros
        total = score if slot == 0 else total + score
        rest = rest & (expert != lowest[:, None])
        tl.store(experts + to + slot, lowest.to(tl.int64), mask=real)
        tl.store(probabilities + to + slot, score * scaling, mask=real)
    if RENORMALISE:
        for slot in range(TOP):
            score = tl.zeros((ROWS,), dtype=tl.float32)
            lowest = tl.min(tl.where(chosen, expert, SIZE), axis=1)
            score = tl.sum(tl.where(expert == lowest[:, None], values, 0.0), axis=1)
            chosen = chosen & (expert != lowest[:, None])
            tl.store(probabilities + to + slot, tl.div_rn(score, total + _LEAST_TOTAL) * scaling, mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _gradient(
    scores, experts, grad, out, tokens, count, scaling,
    RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)[None, :]
    real = row < tokens
    inside = real[:, None] & (expert < count)
    at, of = row.to(tl.int64)[:, None] * count + expert, row.to(tl.int64) * TOP
    values = tl.load(scores + at, mask=inside, other=0.0)
    to_scores = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    total, inner = tl.zeros((ROWS,), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    for slot in range(TOP):
        number = tl.load(experts + of + slot, mask=real, other=0)
        g = tl.load(grad + of + slot, mask=real, other=0.0) * scaling
        mine = expert == number[:, None]
        to_scores = tl.where(mine, g[:, None], to_scores)
        score = tl.sum(tl.where(mine, values, 0.0), axis=1)
        total, inner = total + score, inner + g * score
    if RENORMALISE:
        total = total + _LEAST_TOTAL
        inner = tl.div_rn(inner, total)
        share = tl.div_rn(tl.full((ROWS,), 1.0, dtype=tl.float32), total)
        kept, inner_all = to_scores, tl.zeros((ROWS,), dtype=tl.float32)
        to_scores = tl.zeros((ROWS, SIZE), dtype=tl.float32)
        for slot in range(TOP):
            mine = expert == tl.load(experts + of + slot, mask=real, other=0)[:, None]
            part = (kept - inner[:, None]) * share[:, None]
            to_scores = tl.where(mine, part, to_scores)
            inner_all += tl.sum(tl.where(mine, part * values, 0.0), axis=1)
        inner = inner_all
    to_logits = to_scores * values * (1.0 - values) if SIGMOID else values * (to_scores - inner[:, None])
    tl.store(out + at, to_logits, mask=inside)


def scores(logits: Tensor, sigmoid: bool) -> Tensor:
    """See ``reference.scores``."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if out.numel():
        grid, constants, options = _shape(logits)
        _scores[grid](logits, out, *logits.shape, SIGMOID=sigmoid, **constants, **options)
    return out


def choose(choice: Tensor, scores: Tensor, k: int, renormalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """See ``reference.choose``."""
    choice, shape = choice.contiguous(), (len(scores), k)
    probabilities = torch.empty(shape, dtype=torch.float32, device=scores.device)
    experts = torch.empty(shape, dtype=torch.int64, device=scores.device)
    if experts.numel():
        grid, constants, options = _shape(scores)
        constants |= {"RENORMALISE": renormalise, "TOP": k}
        _choose[grid](choice, scores, probabilities, experts, *scores.shape, scaling, **constants, **options)
    return probabilities, experts


def gradient(scores: Tensor, experts: Tensor, grad: Tensor, renormalise: bool, scaling: float, sigmoid: bool) -> Tensor:
    """See ``reference.gradient``."""
    out, grad = torch.empty_like(scores), grad.contiguous()
    if out.numel():
        grid, constants, options = _shape(scores)
        constants |= {"RENORMALISE": renormalise, "SIGMOID": sigmoid, "TOP": experts.shape[1]}
        _gradient[grid](scores, experts, grad, out, *scores.shape, scaling, **constants, **options)
    return out


def _shape(scores: Tensor) -> tuple[tuple[int], dict[str, int], dict[str, int | bool]]:
    tokens, count = scores.shape
    tile = tiles.gpu(scores.device).router
    constants = {"ROWS": tile.m, "SIZE": triton.next_power_of_2(count)}
    return (triton.cdiv(tokens, tile.m),), constants, gpu.options(tile)
