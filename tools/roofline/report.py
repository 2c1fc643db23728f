"""The roofline of both models as rows and as a page: a learner's microbatch, and decode steps of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from megatron_rlzero.kernels import tiles
from tools.published import MODELS, Sizes
from tools.roofline import models
from tools.roofline.launch import BANDWIDTH, FP32, MATRIX, TILES, cost
from tools.roofline.models import Operator
from tools.roofline.operators import chunks
from tools.tables import markdown

#: a microbatch of the learner, tokens of its documents; decode steps of the engine, sequences and the keys of each
DOCUMENTS, SEQUENCES, KEYS = [4096, 4096], (64, 128), 4096
#: multiprocessors of an H200
MULTIPROCESSORS = 132
HEADER = (
    "operator", "in the model", "pass", "MB", "bf16 GFLOP", "fp32 GFLOP", "filled", "FLOP/byte", "bound", "µs each",
    "ms in the model",
)  # fmt: skip
SHARE = "filled"
RATES = f"{BANDWIDTH / 1e12:g} TB/s, {MATRIX / 1e12:g} TFLOP/s of dense bf16, {FP32 / 1e12:g} TFLOP/s of fp32"
METHOD = f"""**A calculation: no GPU ran any of it.** For every operator bytes and FLOPs are counted from shapes and
tiles, by one formula for each in `tools/roofline/`, and divided by what NVIDIA's data sheet gives an H200:
{RATES}. A launch takes as long as the
slowest of the three, and launches follow each other. Latencies, the time of a launch, idle multiprocessors, caches that
hold less than assumed, communication, and all that is not an operator of `kernels/` (residual sums, permutation of
rows, the optimizer) are not in it: real times are longer. The other way round, some MB that a launch leaves in the L2
cache for the next one are counted as if they came from memory.

Counted is what the kernels do: tensors of each launch once, states and partial results that go through memory, whole
tiles (those of sm_90) with their padding and masked scores. *Filled* is the share of the products' FLOPs that is
neither; FLOP/byte counts all of them. Products of fp32 and everything elementwise run on the fp32 units. One GPU holds
the whole model in bf16; `reduction_slices` is {models.SLICES}; experts have equal numbers of rows."""


def steps() -> dict[tuple[str, str], list[Operator]]:
    """By model and step."""
    found = {(model, "learner"): models.learner(model, DOCUMENTS) for model in MODELS}
    return found | {(model, f"decode of {n}"): models.decode(model, n, KEYS) for model in MODELS for n in SEQUENCES}


def rows(operators: Sequence[Operator]) -> list[list[object]]:
    """In the order of HEADER."""
    found = []
    for x in operators:
        for direction, launches in (("forward", x.forward), ("backward", x.backward)):
            if launches:
                c = cost(launches)
                counted = (c.bytes / 1e6, c.matrix / 1e9, c.fp32 / 1e9, c.filled, c.intensity)
                times = (c.seconds * 1e6, x.count * c.seconds * 1e3)
                found.append([x.name, x.count, direction, *counted, c.bound, *times])
    return found


def milliseconds(operators: Iterable[Operator], direction: str) -> float:
    """Of all operators of the model; direction: forward | backward."""
    return sum(1e3 * x.count * cost(getattr(x, direction)).seconds for x in operators)


def remarks() -> str:
    """What the shapes make of it."""
    s = Sizes("Qwen3-30B-A3B")
    chunk, head = chunks(sum(DOCUMENTS), s.vocabulary)[0], 2 * s.vocabulary * s.hidden / 1e6
    columns = (s.heads + 2 * s.kv_heads) * s.dim
    programs = ceil(SEQUENCES[-1] / TILES.product.m) * ceil(columns / TILES.product.n)
    return f"""What to look at:

- The log-probability takes {chunk} rows at a time, as many as `tiles.GPU_LOGITS` allows at {s.vocabulary:,} ids.
  Every time it reads the whole head, {head:,.0f} MB; backward it also writes an fp32 gradient of the head and adds it
  to the sum so far.
- Decoding fills few rows of the experts' tiles, of the tiles of queries (one token's heads of a KV head in
  {TILES.attention.m} rows) and of the scan's chunks of {tiles.CHUNK} tokens.
- A decode step's dense products have few programs, queries, keys and values of Qwen3 {programs} for the H200's
  {MULTIPROCESSORS} multiprocessors. That is too few to draw all of the memory's bandwidth, which the times assume."""


def page() -> str:
    """Markdown."""
    parts, found = [f"## Roofline\n\n{METHOD}\n\n{remarks()}"], steps()
    for model in MODELS:
        learner, decode = found[model, "learner"], found[model, f"decode of {SEQUENCES[-1]}"]
        sums = [milliseconds(found[model, f"decode of {n}"], "forward") for n in SEQUENCES]
        each = "; ".join(f"{total:.1f} ms for {n} sequences" for n, total in zip(SEQUENCES, sums, strict=True))
        both = " and ".join(f"{milliseconds(learner, name):,.0f} ms {name}" for name in ("forward", "backward"))
        parts += [
            f"### {model}: a learner's microbatch of {sum(DOCUMENTS):,} tokens, {len(DOCUMENTS)} documents",
            f"Sum: {both}.",
            markdown(HEADER, rows(learner), SHARE),
            f"### {model}: a decode step of {SEQUENCES[-1]} sequences, {KEYS:,} keys each",
            f"Sum: {each}.",
            markdown(HEADER, rows(decode), SHARE),
        ]
    return "\n\n".join(parts)
