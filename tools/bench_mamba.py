"""What the Mamba-2 scan costs: against the torch path of transformers, in turns in one process; growth with the length.

Usage: python tools/bench_mamba.py [rounds]. fp32, one thread, ours in the form that this machine takes. Theirs is
mamba2_chunk_scan of transformers.models.nemotron_h (chunks of 128, one document) and, for a decoding step of 16
sequences, its recurrence mamba2_selective_state_update; neither gives one token the same bits in two batches. Ours
keeps the calls' rows of new tokens in a cache; a step starts at positions of its own, and so moves a state once in a
chunk's length.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

from megatron_rlzero.kernels import libraries

#: heads, head dimension, groups, state size
SIZES = {"tiny": (4, 16, 1, 16), "one group": (8, 64, 1, 128), "two groups": (8, 64, 2, 128)}
LENGTHS = (1024, 4096)
SEQUENCES, STEPS = 16, 64


def in_turns(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median seconds of each, the first round left out."""
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, found in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            if turn:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    os.environ.update(libraries.settings())
    import torch
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update

    from megatron_rlzero.kernels import tiles
    from megatron_rlzero.kernels.mamba import Cache, scan, scan_cached

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def make(tokens: int, heads: int, dim: int, groups: int, state: int) -> list[torch.Tensor]:
        shapes = ((tokens, heads, dim), (tokens, heads), (heads,), *2 * ((tokens, groups, state),), (heads,), (heads,))
        x, dt, a, *rest, bias = (torch.randn(*shape) for shape in shapes)
        return [t.requires_grad_() for t in (x, dt, -(a.abs() + 0.1), *rest, bias - 3)]

    def theirs(x, dt, A, B, C, D, bias):
        return mamba2_chunk_scan(x[None], dt[None], A, B[None], C[None], 128, D=D, dt_bias=bias, dt_softplus=True)

    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, one thread, {rounds} rounds in turns")
    for name, sizes in SIZES.items():
        growth: dict[str, list[float]] = {}
        for length in LENGTHS:
            inputs = make(length, *sizes)
            plain = [t.detach() for t in inputs]
            runs = {
                "forward": [lambda p=plain, n=length: scan(*p, [n]), lambda p=plain: theirs(*p)],
                "forward and backward": [
                    lambda t=inputs, n=length: torch.autograd.grad(scan(*t, [n]).sum(), t),
                    lambda t=inputs: torch.autograd.grad(theirs(*t).sum(), t),
                ],
            }
            for what, pair in runs.items():
                ours, other = in_turns(rounds, *pair)
                growth.setdefault(what, []).append(ours)
                print(
                    f"{name:10} {length:5} tokens, {what:20}  ours {1e6 * ours / length:7.2f} us/token  "
                    f"transformers {1e6 * other / length:7.2f} us/token  theirs / ours {other / ours:.2f}",
                    flush=True,
                )
        for what, (short, long) in growth.items():
            print(f"{name:10} {what}: time of {LENGTHS[1]} / {LENGTHS[0]} tokens {long / short:.2f}")

        H, P, G, N = sizes
        c, blocks = tiles.CHUNK, SEQUENCES + 1
        shapes = ((H, P, N), (c, H, P), (c, H), (c, G, N))
        cache = Cache(*(torch.zeros(blocks, *shape) for shape in shapes), torch.randperm(blocks)[:SEQUENCES])
        x, dt, A, B, C, D, bias = token = [t.detach() for t in make(SEQUENCES, *sizes)]
        starts, state = [100 + 5 * i for i in range(SEQUENCES)], torch.zeros(SEQUENCES, H, P, N)
        wide = (A[:, None, None].expand(H, P, N), D[:, None].expand(H, P), bias[:, None].expand(H, P))

        def step(token=token, cache=cache, starts=starts) -> None:
            for i in range(STEPS):
                scan_cached(*token, [1] * SEQUENCES, [start + i for start in starts], cache)

        def their_step(x=x, dt=dt, B=B, C=C, state=state, wide=wide, P=P) -> None:
            A, D, bias = wide
            for _ in range(STEPS):
                mamba2_selective_state_update(
                    state, x, dt[..., None].expand(-1, -1, P), A, B, C, D=D, dt_bias=bias, dt_softplus=True
                )

        ours, other = (1e6 * seconds / STEPS / SEQUENCES for seconds in in_turns(rounds, step, their_step))
        print(
            f"{name:10} step of {SEQUENCES} sequences  ours {ours:7.2f} us/token  recurrence {other:7.2f} us/token  "
            f"ours / theirs {ours / other:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
