"""The compiled form of an operator: made where it is first used, kept in the user's cache for every later process."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

COMPILER = "g++"
#: Operators that have one, each from the sources in its folder.
LIBRARIES = ("attention", "mamba")
#: what torch calls the CPU's vectors -> the architecture that has them
ARCHITECTURES = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
_VECTORS = torch.backends.cpu.get_cpu_capability()
FLAGS = (
    *("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi"),
    f"-march={ARCHITECTURES.get(_VECTORS, 'x86-64')}",
)
_KERNELS = Path(__file__).parent
_find = cache(shutil.which)


def usable() -> bool:
    """Whether this machine can compile and run the libraries: it has a compiler and a CPU with AVX2."""
    return _find(COMPILER) is not None and _VECTORS in ARCHITECTURES


@cache
def compiled(name: str, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library of operator ``name``, from $XDG_CACHE_HOME/megatron_rlzero, ~/.cache if that is not set.

    Its file is named by sources, flags and compiler, and appears whole: processes may compile at the same time.

    Raises:
        RuntimeError: there is no compiler, or it failed; with what it said.
    """
    compiler = _find(COMPILER)
    if compiler is None:
        raise RuntimeError(f"operators = native needs the compiler {COMPILER}, which is not in PATH; install it")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources, headers = (sorted((_KERNELS / name).glob(pattern)) for pattern in ("*.cpp", "*.h"))
    texts = (path.read_text() for path in (*sources, *headers, _KERNELS / "vectors.h"))
    text = "\0".join((*texts, *flags, version))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron_rlzero")
    path = directory / f"{name}-{key}.so"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            made = Path(temporary, path.name)
            command = [compiler, *flags, f"-I{_KERNELS}", *map(str, sources), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"{' '.join(command)} failed; g++ 11 or later is needed:\n{result.stderr}")
            made.replace(path)
    return ctypes.CDLL(str(path))
