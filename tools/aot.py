"""Compiles the Triton kernels of the operators for a GPU that is not there, and reads what each of them takes.

The operators run on meta tensors, which have shapes and no memory; every launch is compiled by Triton's own runtime as
it would be on the GPU, specialisation included, and not started.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_rlzero.kernels import backend, gpu, tiles

#: compute capability -> bytes of shared memory that a program may have (CUDA C++ Programming Guide)
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
#: the assembler that Triton takes where it is another one
PTXAS = {100: "ptxas-blackwell"}
#: an instruction that multiplies matrices on tensor cores
MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture.

    Attributes:
        registers: per thread; spills: bytes that a thread stores for want of registers; shared: bytes per program.
        warps: per program.
        matrix: the instruction for products of matrices, or "".
    """

    kernel: str
    capability: int
    constants: str
    registers: int
    spills: int
    shared: int
    warps: int
    matrix: str


class _Driver:
    """What the runtime asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # the runtime keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int) -> Iterator[dict[tuple, Any]]:
    """Within it every operator takes its Triton form, and every launch is compiled for ``capability`` and recorded."""
    found: dict[tuple, Any] = {}
    run, set_aside = JITFunction.run, (backend.triton, tiles.gpu, gpu._multiprocessors)

    def compiled(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[self.fn.__module__, self.fn.__name__, kernel.hash] = (kernel, kwargs, tuple(grid))
        return kernel

    previous = triton.runtime.driver._active if hasattr(triton.runtime.driver, "_active") else None
    triton.runtime.driver.set_active(_Driver(capability))
    JITFunction.run = compiled
    backend.triton, tiles.gpu, gpu._multiprocessors = lambda x: True, lambda d: tiles.GPUS[capability], lambda d: 132
    try:
        yield found
    finally:
        JITFunction.run = run
        backend.triton, tiles.gpu, gpu._multiprocessors = set_aside
        triton.runtime.driver._active = previous


def compiled(call: Callable[[], Any], capability: int) -> list[Compiled]:
    """What the launches of ``call`` take."""
    with compiling(capability) as found:
        call()
    return [_read(module, name, capability, *kernel) for (module, name, _), (*kernel, _) in found.items()]


def grids(call: Callable[[], Any], capability: int) -> dict[str, tuple[int, ...]]:
    """Programs along each dimension of the launches of ``call``."""
    with compiling(capability) as found:
        call()
    return {f"{module}.{name}": grid for (module, name, _), (_, _, grid) in found.items()}


def _read(module: str, name: str, capability: int, kernel: Any, kwargs: dict[str, Any]) -> Compiled:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)[1]
        command = [str(_TOOLS / PTXAS.get(capability, "ptxas")), "-v", "--fmad=false", f"-arch={target}", file.name]
        usage = subprocess.run([*command, "-o", "/dev/null"], capture_output=True, text=True, check=True).stderr
    registers, spills = (
        int(re.search(pattern, usage)[1]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores")
    )
    matrix = MATRIX.search(kernel.asm["ptx"])
    constants = ", ".join(f"{k}={v}" for k, v in kwargs.items() if k.isupper())
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    label = f"{module.split('kernels.')[1].removesuffix('.triton')}.{name.strip('_')}"
    return Compiled(label, capability, constants, registers, spills, shared, warps, matrix[1] if matrix else "")
