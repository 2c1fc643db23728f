"""What computes inside every module, and for how long: seen in a forward pass with hooks, not read from lists of names.

Each operation that torch dispatches is put down to the innermost module that runs, and to the folder of ``kernels/`` in
whose code it was called, if it was in any. What is left are operations that nobody here has aligned.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_rlzero.kernels as kernels

KERNELS = str(Path(kernels.__file__).parent)
#: operations that put values elsewhere, or make them, and compute none; views and elementwise ones are known by torch
MOVES = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "_unsafe_view", "arange", "cat", "clone", "constant_pad_nd", "copy_", "embedding", "empty",
        "empty_like", "empty_strided", "fill_", "full", "full_like", "gather", "index", "index_copy_", "index_fill_",
        "index_put_", "index_select", "lift_fresh", "masked_fill_", "new_empty", "new_empty_strided", "new_full",
        "new_zeros", "ones", "ones_like", "repeat", "scalar_tensor", "scatter", "scatter_", "slice_scatter", "stack",
        "zero_", "zeros", "zeros_like",
    )
)  # fmt: skip
#: operations whose implementation is a Python function, by name
_python: dict[str, Callable] = {}


def look_into_libraries() -> None:
    """Python functions registered from now on as operations are seen as what they call; before vLLM's import."""
    register = library.Library.impl

    def impl(self, name, function, *args, **kwargs):
        if isinstance(name, str) and callable(function):
            _python[f"{self.ns}::{name.split('::')[-1].split('.')[0]}"] = function
        return register(self, name, function, *args, **kwargs)

    library.Library.impl = impl


class Hooks:
    """Calls of every module of ``model``, from the outermost to the innermost, as ``entered`` and ``left``."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__()
        self._running: list[str] = []
        self._handles = []
        for name, module in model.named_modules(prefix=prefix):
            self._handles.append(module.register_forward_pre_hook(lambda m, inputs, name=name: self.entered(name)))
            self._handles.append(module.register_forward_hook(lambda m, inputs, out, name=name: self.left(name, out)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def entered(self, name: str) -> None:
        self._running.append(name)

    def left(self, name: str, output: Any) -> None:
        self._running.pop()


@dataclass
class Seen:
    """What ran in one module and not in a module inside it.

    Attributes:
        operators: folder of ``kernels/`` -> files of it whose code ran.
        elementwise, foreign: operations from elsewhere on floating-point numbers -> how often; foreign ones add several
            elements up, or nobody knows what they do.
        shape, dtype: of the module's result, or of the first of several.
    """

    operators: dict[str, set[str]] = field(default_factory=dict)
    elementwise: Counter[str] = field(default_factory=Counter)
    foreign: Counter[str] = field(default_factory=Counter)
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def values(self) -> dict[str, Any]:
        operators = {name: sorted(files) for name, files in self.operators.items()}
        return vars(self) | {
            "operators": operators,
            "elementwise": dict(self.elementwise),
            "foreign": dict(self.foreign),
        }


class Watch(Hooks, TorchDispatchMode):
    """Watches the forward passes of a model."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        self._seen: dict[str, Seen] = {}

    def found(self) -> dict[str, dict[str, Any]]:
        """Module -> its ``Seen`` as JSON values, in the order of the first calls; of modules in which something ran."""
        return {name: s.values() for name, s in self._seen.items() if s.operators or s.elementwise or s.foreign}

    def entered(self, name: str) -> None:
        if not self._running:
            self.__enter__()
        super().entered(name)
        self._seen.setdefault(name, Seen())

    def left(self, name: str, output: Any) -> None:
        super().left(name, output)
        if not self._running:
            self.__exit__(None, None, None)
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if tensors:
            seen = self._seen[name]
            seen.shape, seen.dtype = tuple(tensors[0].shape), str(tensors[0].dtype).removeprefix("torch.")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        seen, operator = self._seen[self._running[-1]], _operator()
        if operator is not None:
            seen.operators.setdefault(operator[0], set()).add(operator[1])
            return func(*args, **kwargs)
        if (implementation := _python.get(func.name().split(".")[0])) is not None:
            with self:
                return implementation(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "aten" and (func.is_view or func._schema.name in MOVES):
            return result
        if any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves((args, kwargs, result))):
            kind = seen.elementwise if torch.Tag.pointwise in func.tags else seen.foreign
            kind[func.name()] += 1
        return result


def _operator() -> tuple[str, str] | None:
    """Folder and file of the innermost function of an operator that is being called."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(KERNELS):
            parts = Path(path[len(KERNELS) + 1 :]).parts
            if len(parts) == 2:
                return parts[0], Path(parts[1]).stem
        frame = frame.f_back
    return None


class Clock(Hooks):
    """Seconds that the forward passes spend in each module and not in a module inside it; for CPUs."""

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        super().__init__(model, prefix)
        self._seconds: Counter[str] = Counter()
        self._since = 0.0

    def found(self) -> dict[str, float]:
        return dict(self._seconds)

    def entered(self, name: str) -> None:
        self._count()
        super().entered(name)

    def left(self, name: str, output: Any) -> None:
        self._count()
        super().left(name, output)

    def _count(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now
