"""The one choice between the forms of an operator: Triton for tensors on a GPU, native or torch for those of a CPU.

Native is C++ in an operator's folder, compiled on demand; torch is what the others are tested against, and what
computes where there is no compiler or no AVX2. Forms agree within rounding, not to the bit: learner and engine must
take the same.
"""

import os

import torch
from torch import Tensor

from megatron_rlzero.kernels import compiler, tiles

BACKENDS = ("native", "torch")
#: whether Triton interprets its kernels, on tensors in host memory; what Triton itself reads, once, at its import
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_chosen = ""


def backend() -> str:
    """What computes this process's models: sm_90 or another architecture of GPUs where there is one, native or torch.

    Unless ``choose`` was called, native where this machine can compile and run it.
    """
    return _chosen or _architecture() or BACKENDS[not compiler.usable()]


def _architecture() -> str:
    return f"sm_{tiles.capability(torch.device('cuda'))}" if torch.cuda.is_available() else ""


def choose(name: str) -> None:
    """Fixes ``backend`` for this process, and compiles what it needs.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: native cannot be compiled or run here, or this process's GPU is of another architecture or has no
            tiles.
    """
    global _chosen
    if name.startswith("sm_"):
        if (mine := _architecture()) != name:
            raise RuntimeError(
                f"operators = {name} and {f'a GPU of {mine}' if mine else 'no GPU'} here; learner and engine have to "
                "run on GPUs of one architecture"
            )
        tiles.gpu(torch.device("cuda"))
    elif name not in BACKENDS:
        raise ValueError(f"operators = {name}: expected is sm_N, or one of {', '.join(BACKENDS)}")
    if name == "native":
        if not compiler.usable():
            raise RuntimeError(
                f"operators = native needs the compiler {compiler.COMPILER} and a CPU with AVX2; "
                "learner and engine have to run on machines of one kind"
            )
        for library in compiler.LIBRARIES:
            compiler.compiled(library)
    _chosen = name


def native(x: Tensor) -> bool:
    """Whether the native form computes tensors that lie where ``x`` does."""
    return x.device.type == "cpu" and backend() == "native"


def triton(x: Tensor) -> bool:
    """Whether the Triton form computes tensors that lie where ``x`` does."""
    return x.device.type == "cuda" or (INTERPRETED and _chosen == "triton")
