"""All that is checked and measured: jobs, each of which makes its own tensors and returns what it found."""

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_rlzero.kernels import backend
from tools.gpu_check import (
    clock,
    dense,
    documents,
    graphs,
    mixture,
    ranks,
    rows,
    schedules,
    steps,
    timed,
    times,
    values,
)
from tools.gpu_check.case import Operator
from tools.gpu_check.environment import environment
from tools.gpu_check.sequences import packed
from tools.gpu_check.sizes import DEVICE, DTYPES

Checks = list[dict[str, Any]]
#: folders of kernels/ with operators; what takes longest comes first
FOLDERS = (
    *("attention", "mamba", "linear", "log_prob", "experts", "norm", "conv1d", "router", "reduction", "activation"),
    "rotary",
)
#: those of operators that look back at earlier tokens
LOOKING_BACK = ("attention", "conv1d", "mamba")


@dataclass(frozen=True)
class Job:
    """part: environment | operators (against float64) | invariance (bits) | times; folder: of kernels/, or ""."""

    part: str
    folder: str
    name: str
    dtype: str
    run: Callable[[], Checks]

    @property
    def key(self) -> str:
        return " ".join(filter(None, (f"{self.part}:", self.name, self.dtype)))


def jobs() -> Iterator[Job]:
    """What is timed comes last, and only on a GPU."""
    yield Job("environment", "", "", "", lambda: [environment()])
    made = [
        *dense.operators(),
        *mixture.operators(),
        *steps.operators(),
        *((name, name, partial(_packed, name)) for name in LOOKING_BACK),
    ]
    for folder in FOLDERS:
        for label, dtype in DTYPES.items():
            for _, name, make in (entry for entry in made if entry[0] == folder):
                yield Job("operators", folder, name, label, partial(_values, make, dtype))
                yield Job("invariance", folder, name, label, partial(_rows, make, dtype))
            for name, check in _together(folder):
                yield Job("invariance", folder, f"{folder}, {name}", label, partial(check, folder, dtype))
    if DEVICE.type == "cuda":
        yield Job("times", "", "limits", "bf16", clock.limits)
        for folder, name, make in timed.items():
            yield Job("times", folder, name, "bf16", partial(times.measure, make))


def run(job: Job) -> dict[str, Any]:
    """What the job found, or its error, and whether it passed; times pass unless they fail."""
    if backend.INTERPRETED:
        backend._chosen = "triton"
    torch.manual_seed(0)
    begin, error, checks = time.perf_counter(), "", list[dict[str, Any]]()
    try:
        checks = job.run()
    except Exception:  # whatever an operator raises is a finding, and no reason to leave the others unchecked
        error = traceback.format_exc()
    gc.collect()
    passed = not error and all(check.get("ok") is not False for check in checks)
    return {**describe(job), "ok": passed, "checks": checks, "error": error, "seconds": time.perf_counter() - begin}


def describe(job: Job) -> dict[str, Any]:
    return {"part": job.part, "folder": job.folder, "name": job.name, "dtype": job.dtype}


def _together(folder: str) -> Iterator[tuple[str, Callable[[str, torch.dtype], Checks]]]:
    if folder in LOOKING_BACK:
        yield "documents", lambda name, dtype: documents.check(packed(name, dtype))
        yield "schedules", schedules.check
    if folder in (*LOOKING_BACK, "experts"):
        yield "CUDA graph", graphs.check
    if folder in ranks.FOLDERS:
        yield "ranks", ranks.check


def _packed(name: str, dtype: torch.dtype) -> Operator:
    return packed(name, dtype).operator()


def _values(make: Callable[[torch.dtype], Operator], dtype: torch.dtype) -> Checks:
    return values.check(make(dtype), dtype)


def _rows(make: Callable[[torch.dtype], Operator], dtype: torch.dtype) -> Checks:
    return rows.check(make(dtype))
