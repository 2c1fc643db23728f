"""Milliseconds of a call on the GPU: the median of repeats, each with cold caches and with no wait for the host."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: cycles of the GPU in a millisecond, no fewer than there are: what it spins while the host gets ahead
CYCLES = 2_000_000
#: bytes that are written between repeats, several times what the second-level cache of any GPU holds
FLUSHED = 512 << 20
#: seconds of repeats, and the fewest and most of them
SECONDS, FEWEST, MOST = 0.4, 5, 30


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """ms: on the GPU, from the first kernel to the end of the last; host_ms: until the host has started them all.

    Also the fastest and the slowest repeat.
    """
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    started = time.perf_counter() - begin
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    repeats = max(min(int(SECONDS / seconds), MOST), FEWEST)
    rubbish = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    spin = int(CYCLES * (1 + 2e3 * started))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    host = []
    for before, after in events:
        rubbish.zero_()
        torch.cuda._sleep(spin)
        before.record()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
        after.record()
    torch.cuda.synchronize()
    found = [before.elapsed_time(after) for before, after in events]
    median, slowest = statistics.median(found), max(found)
    return {"ms": median, "fastest_ms": min(found), "slowest_ms": slowest, "host_ms": 1e3 * statistics.median(host)}


def forward(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Without gradients."""
    with torch.no_grad():
        return measured(lambda: call(*inputs))


def backward(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, float]:
    """All gradients of one result."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out, wanted = call(*leaves), [x for x in leaves if x.requires_grad]
    grad = torch.randn_like(out)
    return measured(lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True))


def limits() -> list[dict[str, Any]]:
    """What this GPU does at best: bytes a second of a copy, read and written, and FLOPs a second of a bf16 product."""
    size, n = 2 << 30, 8192
    source, target = (torch.zeros(size, dtype=torch.int8, device="cuda") for _ in range(2))
    copied = measured(lambda: target.copy_(source))
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = measured(lambda: a @ b)
    bandwidth, rate = 2 * size / copied["ms"] * 1e3, 2 * n**3 / product["ms"] * 1e3
    return [{"what": "limits", "ok": None, "bytes_per_second": bandwidth, "flops_per_second": rate}]
