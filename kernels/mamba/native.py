"""The scan and its gradients by the compiled kernel, which reads tensors where they lie."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.compiler import compiled
from megatron_rlzero.kernels.mamba.cached import Cache, check

DTYPES = (torch.float32, torch.bfloat16)
#: Chunks from one state that is kept for the backward pass to the next, as in chunk.h.
SEGMENT = 8


class _Rows(ctypes.Structure):
    """``Rows`` of chunk.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("past", ctypes.c_void_p),
        ("block", ctypes.c_int64),
    )


class _Call(ctypes.Structure):
    """``Call`` of chunk.h."""

    _fields_ = (
        *((name, _Rows) for name in ("x", "dt", "B", "C", "dy")),
        *((name, ctypes.c_void_p) for name in ("A", "D", "bias", "state")),
        ("state_block", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "positions", "slots", "kept", "places")),
        *((name, ctypes.c_void_p) for name in ("out", "to_B", "to_C", "to_tokens", "to_state")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "groups", "dim", "size")),
        *((name, ctypes.c_double) for name in ("least", "most")),
        *((name, ctypes.c_int64) for name in ("cached", "bf16", "threads")),
    )


def scan(
    inputs: Sequence[Tensor], lengths: list[int], limit: tuple[float, float], initial: Tensor | None, save: bool
) -> tuple[Tensor, list[Tensor]]:
    """The value of ``dispatch.scan`` for its first seven arguments, and, to be saved, what ``gradients`` needs."""
    x, N, places = inputs[0], inputs[3].shape[2], _places(lengths)
    out = torch.empty(x.shape, dtype=x.dtype)
    kept = torch.empty(places[-1], *x.shape[1:], N, dtype=torch.float32) if save else None
    _run("scan", inputs, lengths, limit, {"places": places}, out=out, state=initial, kept=kept)
    return out, [kept] if save else []


def scan_cached(
    inputs: Sequence[Tensor], lengths: list[int], starts: list[int], cache: Cache, limit: tuple[float, float]
) -> Tensor:
    """See ``dispatch.scan_cached``."""
    x, B = inputs[0], inputs[3]
    check(cache, x, B)
    slots, blocks = cache.slots.tolist(), min(map(len, cache[:4]))
    if min(slots) < 0 or max(slots) >= blocks:
        raise ValueError(f"slots {slots} of a cache of {blocks} blocks")
    out = torch.empty(x.shape, dtype=x.dtype)
    _run("scan", inputs, lengths, limit, {"positions": starts, "slots": slots}, cache, out=out, state=cache.state)
    return out


def gradients(
    inputs: Sequence[Tensor],
    lengths: list[int],
    limit: tuple[float, float],
    initial: Tensor | None,
    saved: Sequence[Tensor],
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See ``gradients.gradients``."""
    x, B = inputs[0], inputs[3]
    to_x, to_B, to_C = (torch.empty(t.shape, dtype=t.dtype) for t in (x, B, B))
    to_tokens = torch.empty(*x.shape[:2], 3, dtype=torch.float32)
    to_initial = None if initial is None else torch.empty(initial.shape, dtype=torch.float32)
    results = {"out": to_x, "to_B": to_B, "to_C": to_C, "to_tokens": to_tokens, "to_state": to_initial}
    numbers = {"places": _places(lengths)}
    _run("gradients", inputs, lengths, limit, numbers, grad=grad, state=initial, kept=saved[0], **results)
    return to_x, to_tokens, to_B, to_C, to_initial


def _places(lengths: list[int]) -> list[int]:
    """Where the states that are kept for each document begin, and at last how many there are."""
    tokens = SEGMENT * tiles.CHUNK
    return [0, *accumulate((length - 1) // tokens for length in lengths)]


def _run(
    function: str,
    inputs: Sequence[Tensor],
    lengths: list[int],
    limit: tuple[float, float],
    numbers: dict[str, list[int]],
    cache: Cache | None = None,
    grad: Tensor | None = None,
    **tensors: Tensor | None,
) -> None:
    """``numbers`` and ``tensors``: the pointers of ``Call``, contiguous but for a cache's state."""
    x, dt, A, B, C, D, bias = inputs
    if any(t.device.type != "cpu" or t.dtype != x.dtype for t in (x, dt, B, C)) or x.dtype not in DTYPES:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (x, dt, B, C))
        raise TypeError(f"operators = native: the scan takes x, dt, B, C in fp32 or bf16 on a CPU, one dtype: {kinds}")
    state = tensors["state"]
    if state is not None and cache is None:
        state = tensors["state"] = state.contiguous()
    tensors.update(A=A.contiguous(), D=D.contiguous(), bias=bias.contiguous())
    numbers["starts"] = [0, *accumulate(lengths)]
    arrays = {name: (ctypes.c_int64 * len(values))(*values) for name, values in numbers.items()}
    read = {"x": x, "dt": dt, "B": B, "C": C} if grad is None else {"x": x, "dt": dt, "B": B, "C": C, "dy": grad}
    read = {name: t if t.stride(-1) == 1 else t.contiguous() for name, t in read.items()}
    rows = {name: _Rows(t.data_ptr(), *t.stride()[:2]) for name, t in read.items()}
    if cache is not None:
        for name, past in (("x", cache.x), ("dt", cache.dt), ("B", cache.B)):
            rows[name].past, rows[name].block = past.data_ptr(), past.stride(0)
    call = _Call(
        **rows,
        **{name: ctypes.addressof(array) for name, array in arrays.items()},
        **{name: t.data_ptr() for name, t in tensors.items() if t is not None},
        state_block=0 if state is None else state.stride(0),
        sequences=len(lengths),
        heads=x.shape[1],
        groups=B.shape[1],
        dim=x.shape[2],
        size=B.shape[2],
        least=limit[0],
        most=limit[1],
        cached=cache is not None,
        bf16=x.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    getattr(compiled("mamba"), function)(ctypes.byref(call))
