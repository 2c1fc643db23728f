"""Operators of the two published models: how often each is in the model, and its launches, from their config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.published import Sizes
from tools.roofline import attention, operators, scan
from tools.roofline.launch import Both, Launch

#: ``reduction_slices`` of the configuration, its default
SLICES = 4


@dataclass(frozen=True)
class Operator:
    """count: how many the whole model has. The head of the engine is the logits and their log-softmax."""

    name: str
    count: int
    forward: list[Launch]
    backward: list[Launch]


def learner(model: str, lengths: list[int]) -> list[Operator]:
    """Of a microbatch of documents, on one GPU that holds the whole model."""
    s, t = Sizes(model), sum(lengths)
    found = [
        ("norm of the hidden state", s.norms, operators.norm(t, 1, s.hidden)),
        *((name, s.mamba_layers, both) for name, both in _mamba(s, lengths)),
        *((name, s.attention_layers, both) for name, both in _attention(s, lengths)),
        *((name, s.expert_layers, both) for name, both in _experts(s, t)),
        ("log-probability", 1, operators.log_prob(t, s.hidden, s.vocabulary, SLICES)),
    ]
    return [Operator(name, count, *both) for name, count, both in found]


def decode(model: str, sequences: int, keys: int) -> list[Operator]:
    """Of a step of one new token for each sequence of ``keys`` tokens, on one GPU that holds the whole model."""
    s = Sizes(model)
    touched, first = min(s.experts, sequences * s.k), s.width * (1 + s.qwen)
    zeros = operators.passed(sequences * s.k * s.hidden, 0, operators.BF16)
    other = {
        "attention": attention.decode(sequences, keys, s.heads, s.kv_heads, s.dim),
        "experts, first": operators.grouped_linear(sequences * s.k, touched, first, s.hidden, sequences)[0],
        "experts, second": [zeros, *operators.grouped_linear(sequences * s.k, touched, s.hidden, s.width)[0]],
        "log-probability": operators.log_softmax(sequences, s.hidden, s.vocabulary),
    }
    if s.mamba_layers:
        other["convolution"] = operators.decode_convolution(sequences, s.channels, s.taps)
        other["scan"] = scan.decode(sequences, *s.scan)
    # what does not know of sequences is the learner's own
    return [Operator(x.name, x.count, other.get(x.name, x.forward), []) for x in learner(model, [1] * sequences)]


def _mamba(s: Sizes, lengths: list[int]) -> Iterator[tuple[str, Both]]:
    if not s.mamba_layers:
        return
    t, heads = sum(lengths), s.scan[0]
    # gate, x, B, C and time steps lie one under the other in the first weight
    yield "Mamba, in", operators.column_parallel(t, s.inner + s.channels + heads, s.hidden, SLICES, blocks=5)
    yield "convolution", operators.convolution(t, s.channels, s.taps)
    yield "scan", scan.scan(lengths, *s.scan)
    yield "gated norm", operators.norm(t, s.groups, s.inner // s.groups, gated=True)
    yield "Mamba, out", operators.row_parallel(t, s.hidden, s.inner, SLICES)


def _attention(s: Sizes, lengths: list[int]) -> Iterator[tuple[str, Both]]:
    t, each = sum(lengths), (s.heads, s.kv_heads)
    yield "queries, keys, values", operators.column_parallel(t, (s.heads + 2 * s.kv_heads) * s.dim, s.hidden, SLICES)
    if s.qwen:
        yield "norms of queries and keys", _joined(*(operators.norm(t, heads, s.dim) for heads in each))
        yield "rotary", _joined(*(operators.rotary(t, heads, s.dim) for heads in each))
    yield "attention", attention.attention(lengths, s.heads, s.kv_heads, s.dim)
    yield "attention, out", operators.row_parallel(t, s.hidden, s.heads * s.dim, SLICES)


def _experts(s: Sizes, t: int) -> Iterator[tuple[str, Both]]:
    rows, first = t * s.k, s.width * (1 + s.qwen)
    yield "gate", operators.gate(t, s.hidden, s.experts)
    yield "top-k", operators.top_k(t, s.experts, s.k, biased=not s.qwen)
    yield "experts, first", operators.grouped_linear(rows, s.experts, first, s.hidden)
    yield "experts, activation", operators.activation(rows, s.width, s.qwen)
    yield "experts, second", operators.grouped_linear(rows, s.experts, s.hidden, s.width)
    yield "combine", operators.combine(t, s.k, s.hidden)
    if s.shared:
        yield "shared expert, first", operators.column_parallel(t, s.shared, s.hidden, SLICES)
        yield "shared expert, activation", operators.activation(t, s.shared, s.qwen)
        yield "shared expert, second", operators.row_parallel(t, s.hidden, s.shared, SLICES)


def _joined(*parts: Both) -> Both:
    """One after the other."""
    return tuple([launch for part in parts for launch in part[i]] for i in (0, 1))
