"""Bits of what one of several ranks computes, columns, slices, heads, groups, channels, experts; and of an engine."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rlzero.kernels.activation import silu_and_mul
from megatron_rlzero.kernels.attention import attention
from megatron_rlzero.kernels.conv1d import causal_conv1d
from megatron_rlzero.kernels.experts import grouped_linear, mlp
from megatron_rlzero.kernels.linear import linear
from megatron_rlzero.kernels.log_prob import log_prob, log_softmax
from megatron_rlzero.kernels.mamba import scan
from megatron_rlzero.kernels.norm import gated_group_norm
from megatron_rlzero.kernels.reduction import sliced_product, tree
from tools.gpu_check.measures import Comparison, poisoned, same
from tools.gpu_check.sequences import LIMIT, packed
from tools.gpu_check.sizes import DEVICE, SIZES, randn

S = SIZES
#: what a rank computes, what that is of one rank's result, and what must differ from that
Cases = Iterator[tuple[str, Tensor, Tensor, Tensor]]


def check(folder: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The parts of ranks against the result of one."""
    with poisoned():
        compare, noticed = Comparison(), 0
        for label, found, wanted, other in FOLDERS[folder](dtype):
            compare(label, found, wanted)
            noticed += not same(other, wanted)
        return [compare.result("parts of ranks", noticed)]


def _linear(dtype: torch.dtype) -> Cases:
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((S.rows, S.sliced), (S.hidden, S.sliced), (S.hidden,)))
    y = linear(x, weight, bias)
    for ranks in (2, 4):
        parts = [linear(x, w, b) for w, b in zip(weight.chunk(ranks), bias.chunk(ranks), strict=True)]
        yield f"columns of {ranks} ranks", torch.cat(parts, 1), y, torch.cat(parts[::-1], 1)
        whole = sliced_product(x, weight.T, S.slices)
        mine = zip(x.chunk(ranks, 1), weight.T.chunk(ranks), strict=True)
        roots = [sliced_product(a, w, S.slices // ranks) for a, w in mine]
        yield f"slices of {ranks} ranks", tree(torch.stack(roots)), whole, sliced_product(x, weight.T, 1)


def _norm(dtype: torch.dtype) -> Cases:
    x, gate, weight = (randn(*shape, dtype=dtype) for shape in ((S.rows, 2 * S.hidden),) * 2 + ((2 * S.hidden,),))
    y, half = gated_group_norm(x, gate, weight, S.norm_groups, 1e-6), slice(0, S.hidden)
    found = gated_group_norm(x[:, half], gate[:, half], weight[half], S.norm_groups // 2, 1e-6)
    yield "half of the groups", found, y[:, half], y[:, S.hidden :]


def _attention(dtype: torch.dtype) -> Cases:
    case = packed("attention", dtype)
    (q, k, v), lengths, group = case.inputs, list(case.lengths), S.heads // S.kv_heads
    y = case.call(q, k, v, lengths)
    for head in range(S.kv_heads):
        heads, kv = slice(head * group, (head + 1) * group), slice(head, head + 1)
        found = attention(q[:, heads], k[:, kv], v[:, kv], lengths, S.dim**-0.5)
        yield f"KV head {head}", found, y[:, heads], y.roll(group, 1)[:, heads]


def _conv(dtype: torch.dtype) -> Cases:
    case = packed("conv1d", dtype)
    (x, weight, bias), half = case.inputs, slice(0, S.channels // 2)
    y = case.call(x, weight, bias, list(case.lengths))
    found = causal_conv1d(x[:, half], weight[half], bias[half], list(case.lengths))
    yield "half of the channels", found, y[:, half], y[:, S.channels // 2 :]


def _scan(dtype: torch.dtype) -> Cases:
    case = packed("mamba", dtype)
    (x, dt, A, B, C, D, bias), (H, _, G, _) = case.inputs, S.scan
    y = case.call(*case.inputs, list(case.lengths))
    for part in range(G):
        h, g = slice(part * H // G, (part + 1) * H // G), slice(part, part + 1)
        found = scan(x[:, h], dt[:, h], A[h], B[:, g], C[:, g], D[h], bias[h], list(case.lengths), LIMIT)
        yield f"group {part}", found, y[:, h], y.roll(H // G, 1)[:, h]


def _experts(dtype: torch.dtype) -> Cases:
    """Experts on 2 and 4 ranks; and as the learner computes them, who sorts the rows and knows their numbers."""
    x, experts = randn(S.rows, S.hidden, dtype=dtype), torch.randint(0, S.stored, (S.rows, S.top), device=DEVICE)
    shapes = ((S.stored, 2 * S.width, S.hidden), (S.stored, S.hidden, S.width))
    w13, w2 = (randn(*shape, dtype=dtype, scale=shape[2] ** -0.5) for shape in shapes)
    y, other = mlp(x, experts, w13, w2), mlp(x, experts, w13.roll(1, 0), w2)
    for ranks in (2, 4):
        found, each = torch.zeros_like(y), S.stored // ranks
        for rank in range(ranks):
            here, mine = experts // each == rank, slice(rank * each, (rank + 1) * each)
            part = mlp(x, torch.where(here, experts - rank * each, -1), w13[mine], w2[mine])
            found = torch.where(here[..., None], part, found)
            yield f"what is elsewhere, {rank} of {ranks}", part.masked_fill(here[..., None], 0), torch.zeros_like(y), y
        yield f"experts of {ranks} ranks", found, y, other
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=S.stored).tolist()
    hidden = silu_and_mul(grouped_linear(x[order // S.top], w13.unbind(), counts))
    sorted_rows = grouped_linear(hidden, w2.unbind(), counts)
    yield "experts of the learner", sorted_rows[order.argsort()].view_as(y), y, other
    yield "tokens in another order", mlp(x.flip(0), experts.flip(0), w13, w2).flip(0), y, other


def _log_prob(dtype: torch.dtype) -> Cases:
    """The learner's head is padded; the engine's logits are a part of padded ones, or as wide as the vocabulary."""
    few = min(S.rows, 64)
    for vocabulary in (S.vocabulary, S.vocabulary // 5):
        hidden, head = randn(few, S.hidden, dtype=dtype), randn(S.padded, S.hidden, dtype=dtype, scale=S.hidden**-0.5)
        targets = torch.randint(0, vocabulary, (few,), device=DEVICE)
        learner, other = (log_prob(hidden, head, targets, n, 0.7)[0] for n in (vocabulary, vocabulary - 1))
        logits = linear(hidden, head)[:, :vocabulary]
        for what, given in (("part of padded logits", logits), ("contiguous logits", logits.contiguous())):
            engine = log_softmax(given, 0.7).gather(1, targets[:, None])[:, 0]
            yield f"{what}, {vocabulary} ids", engine, learner, other


FOLDERS: dict[str, Callable[[torch.dtype], Cases]] = {
    "linear": _linear, "norm": _norm, "attention": _attention, "conv1d": _conv, "mamba": _scan, "experts": _experts,
    "log_prob": _log_prob,
}  # fmt: skip
