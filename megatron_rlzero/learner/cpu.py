"""What Megatron-Core needs to train on a CPU with gloo: one call, never active where a GPU is.

Megatron names the CUDA device, its streams and its tensor types in places that no argument reaches. Everything that
stands in for them is here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def activate() -> None:
    """Makes Megatron-Core run on this process's CPU. Call once, before any Megatron module is built.

    Raises:
        RuntimeError: where a GPU is available.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shims are for machines without a GPU; this one has one")
    if isinstance(torch.cuda.Stream, type) and issubclass(torch.cuda.Stream, _Stream):
        return
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.Stream = torch.cuda.ExternalStream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: _STREAM
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()

    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, op=dist.ReduceOp.SUM, group=None, async_op=False: (
        _average(all_reduce, tensor, group) if op == dist.ReduceOp.AVG else all_reduce(tensor, op, group, async_op)
    )

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Split sizes are on the CPU already and stay tensors, which all_to_all_single does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def device_mode() -> AbstractContextManager[Any]:
    """Inside it, tensors asked for on "cuda" are made on the CPU; does nothing where a GPU is available."""
    return nullcontext() if torch.cuda.is_available() else _CudaIsCpu()


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron sorts gradients by the names of CUDA tensor types.
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


def _average(all_reduce: Callable[..., Any], tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """gloo does not average."""
    all_reduce(tensor, dist.ReduceOp.SUM, group)
    tensor /= dist.get_world_size(group)


class _Stream:
    """Work on a CPU is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


_STREAM = _Stream()
