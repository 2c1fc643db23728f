"""How fast weights travel: a refit's plan against a plain gloo broadcast of as many bytes, in turns in one run.

Usage: python tools/bench_refit.py [gib [rounds]]. Two learner ranks (experts split over both) send a random Qwen3-MoE
to a server of one and of two workers; all are processes of this machine, one thread each, over loopback. Packing into
messages and writing into the workers' own tensors counts as part of the refit; the broadcast goes from the first rank
to all ranks, of one flat tensor.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time

import torch
import torch.distributed as dist

from megatron_rlzero.architectures import qwen3_moe
from megatron_rlzero.architectures.layouts import Parallel, engine_layout, learner_layout
from megatron_rlzero.launch import launch, ranks_store
from megatron_rlzero.resharding.layout import Piece
from megatron_rlzero.resharding.plan import plan
from megatron_rlzero.resharding.transport import execute

LEARNERS = 2
GIB = 2**30


def config(gib: float) -> dict[str, object]:
    """As many layers as make a model of ``gib`` in fp32: 25 MiB each, of 16 experts."""
    return {
        "vocab_size": 32000,
        "hidden_size": 512,
        "num_hidden_layers": max(1, round(gib * 1024 / 27)),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "tie_word_embeddings": False,
    }


def memory(pieces: list[Piece], fill: float) -> dict[str, torch.Tensor]:
    """The local tensors that the pieces lie in."""
    shapes: dict[str, tuple[int, ...]] = {}
    for p in pieces:
        shapes[p.local] = tuple(map(max, shapes.get(p.local, p.local_box.stop), p.local_box.stop))
    return {name: torch.full(shape, fill) for name, shape in shapes.items()}


def rank_main(gib: float, rounds: int) -> None:
    torch.set_num_threads(1)
    store, rank, size = ranks_store()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    workers = size - LEARNERS
    hf = config(gib)
    learner = learner_layout(qwen3_moe, hf, Parallel(LEARNERS, expert_model_parallel_size=LEARNERS), 4)
    engine = {LEARNERS + w: pieces for w, pieces in engine_layout(qwen3_moe, hf, workers).items()}
    transfers = plan(learner, engine)
    dtypes = dict.fromkeys(qwen3_moe.tensors(hf), torch.float32)
    source, target = memory(learner.get(rank, []), 1.0), memory(engine.get(rank, []), torch.nan)
    nbytes = 4 * sum(t.box.numel for t in transfers)
    flat = torch.ones(nbytes // 4)
    seconds: dict[str, list[float]] = {"refit": [], "broadcast": []}
    for turn in range(rounds + 1):
        for name, run in (
            ("refit", lambda: execute(transfers, rank, dist.group.WORLD, source, target, dtypes)),
            ("broadcast", lambda: dist.broadcast(flat, 0)),
        ):
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if turn:  # the first touches fresh memory
                seconds[name].append(time.perf_counter() - start)
    assert all(
        bool((tensor == 1).all()) for name, tensor in target.items() if "embed" not in name and "head" not in name
    )
    if rank == 0:
        refit, broadcast = (statistics.median(seconds[name]) for name in ("refit", "broadcast"))
        size = nbytes / GIB
        print(
            f"{LEARNERS} learner ranks -> {workers} worker(s): {size:.2f} GiB, {len(transfers)} transfers; refit "
            f"{size / refit:.2f} GiB/s, broadcast {size / broadcast:.2f} GiB/s, ratio {broadcast / refit:.2f}",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> int:
    gib, rounds = float((sys.argv[1:2] or ["0.5"])[0]), int((sys.argv[2:3] or ["5"])[0])
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, medians of {rounds} rounds in turns", flush=True)
    return max(launch([__file__, "--rank", str(gib), str(rounds)], LEARNERS + workers) for workers in (1, 2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(float(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
