"""Memory that segments use one after the other: faulting in fresh pages takes as long as some of the products."""

from functools import lru_cache
from math import prod
from threading import get_ident

import torch
from torch import Tensor


class Buffers:
    """Uninitialised tensors by name, each of one dtype; the next one of a name lies where the last one did."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[*shape], contiguous."""
        size = prod(shape)
        held = self._held.get(name)
        if held is None or len(held) < size:
            held = self._held[name] = torch.empty(size, dtype=dtype, device=self._device)
        return held[:size].view(shape)


def buffers(device: torch.device) -> Buffers:
    """Those of this thread, kept from call to call; layout.HELD bounds them."""
    return _buffers(device, get_ident())


@lru_cache(maxsize=8)
def _buffers(device: torch.device, thread: int) -> Buffers:
    return Buffers(device)
