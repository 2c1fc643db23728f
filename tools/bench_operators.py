"""What each operator costs: forward and backward, aligned against stock, in turns in one process.

Usage: python tools/bench_operators.py [rounds]. Sizes are those of a small model: 4,096 tokens in documents of 432,
hidden 256, 8 heads of 32, 16 experts top-2 of width 128, 32,000 ids; fp32, one thread. Both sides run under the
settings of kernels/libraries.py, whose own cost is printed last, for one product in a process of its own without them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from megatron_rlzero.kernels import libraries

TOKENS, HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, TOP_K, WIDTH = 4096, 256, 8, 4, 32, 16, 2, 128
SLICES = 4


def product_seconds() -> float:
    """Median seconds of one fp32 product of 4,096 x 1,024 by 1,024 x 1,024."""
    import torch

    torch.set_num_threads(1)
    x, w, seconds = torch.randn(4096, 1024), torch.randn(1024, 1024), []
    for _ in range(15):
        start = time.perf_counter()
        torch.nn.functional.linear(x, w)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    if sys.argv[1:] == ["product"]:
        print(product_seconds())
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    os.environ.update(libraries.settings())
    import torch

    from megatron_rlzero.invariance.operators import ALIGNED, STOCK

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    documents = [432] * (TOKENS // 432) + [TOKENS % 432]
    x, weight, norm = leaf(TOKENS, HIDDEN), leaf(512, HIDDEN), leaf(HIDDEN)
    q, k, v = leaf(TOKENS, HEADS, DIM), leaf(TOKENS, KV_HEADS, DIM), leaf(TOKENS, KV_HEADS, DIM)
    gate = leaf(EXPERTS, HIDDEN)
    rows, experts = [TOKENS * TOP_K // EXPERTS] * EXPERTS, [leaf(2 * WIDTH, HIDDEN) for _ in range(EXPERTS)]
    permuted, pairs, head = leaf(TOKENS * TOP_K, HIDDEN), leaf(TOKENS * TOP_K, 2 * WIDTH), leaf(32256, HIDDEN)
    outputs, probabilities = leaf(TOKENS, TOP_K, HIDDEN), leaf(TOKENS, TOP_K)
    targets = torch.randint(0, 32000, (TOKENS,))

    plain = torch.nn.functional.linear
    cases = {
        "linear, column-parallel": lambda ops: (
            ops.column_parallel(x, weight, SLICES, None, False) if ops is ALIGNED else plain(x, weight)
        ),
        "linear, row-parallel": lambda ops: (
            ops.row_parallel(x, weight, SLICES, None, False) if ops is ALIGNED else plain(x, weight)
        ),
        "RMSNorm": lambda ops: ops.rms_norm(x, norm, 1e-6),
        "attention": lambda ops: ops.attention(q, k, v, documents, DIM**-0.5),
        "router": lambda ops: ops.top_k(ops.gate(x, gate), TOP_K, True)[0],
        "experts' linear": lambda ops: ops.grouped_linear(permuted, experts, rows),
        "silu and multiply": lambda ops: ops.silu_and_mul(pairs),
        "combination": lambda ops: ops.combine(outputs, probabilities),
    }
    for name, run in cases.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * (rounds + 1)):
            aligned = turn % 2 == 0
            start = time.perf_counter()
            run(ALIGNED if aligned else STOCK).sum().backward()
            if turn > 1:  # the first of each warms up
                seconds[aligned].append(time.perf_counter() - start)
        ours, theirs = statistics.median(seconds[True]), statistics.median(seconds[False])
        print(f"{name:24} aligned {1e3 * ours:8.2f} ms  stock {1e3 * theirs:8.2f} ms  ratio {ours / theirs:.2f}")

    seconds = {True: [], False: []}
    for turn in range(2 * (rounds // 2 + 1)):
        ours = turn % 2 == 0
        start = time.perf_counter()
        if ours:
            ALIGNED.log_prob(x, head, targets, 32000, 1.0, SLICES)[0].sum().backward()
        else:
            plain(x, head[:32000]).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
        if turn > 1:
            seconds[ours].append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds[side]) for side in (True, False))
    print(
        f"{'log-probability':24} aligned {1e3 * ours:8.2f} ms  naive {1e3 * theirs:8.2f} ms  ratio {ours / theirs:.2f}"
    )

    product = [sys.executable, __file__, "product"]
    bare = {name: value for name, value in os.environ.items() if name not in libraries.settings()}
    with_settings, without = (
        float(subprocess.run(product, env=env, capture_output=True, text=True, check=True).stdout)
        for env in (dict(os.environ), bare)
    )
    print(f"library settings, one fp32 product: with / without {with_settings / without:.2f}")


if __name__ == "__main__":
    main()
