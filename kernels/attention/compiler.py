"""The library of native.cpp: compiled where it is first used, kept in the user's cache for every later process."""

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
SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cpp", "vectors.h"))
FLAGS = ("-O3", "-march=x86-64-v4", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi")


def usable() -> bool:
    """Whether this machine can compile and run the library: it has a compiler and a CPU with AVX-512."""
    return shutil.which(COMPILER) is not None and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def compiled(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The compiled library, from $XDG_CACHE_HOME/megatron_rlzero, ~/.cache if that is not set.

    Its file is named by sources, flags and compiler, and appears whole: processes may compile at the same time.

    Raises:
        RuntimeError: there is no compiler, or it failed; with what it said.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise RuntimeError(f"attention = native needs the compiler {COMPILER}, which is not in PATH; install it")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    text = "\0".join((*(source.read_text() for source in SOURCES), *flags, version))
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron_rlzero")
    path = directory / f"attention-{key}.so"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as temporary:
            made = Path(temporary, path.name)
            command = [compiler, *flags, str(SOURCES[0]), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"{' '.join(command)} failed; g++ 11 or later is needed:\n{result.stderr}")
            made.replace(path)
    return ctypes.CDLL(str(path))
