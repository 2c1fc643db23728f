"""How many programs of a kernel a multiprocessor holds at once: the arithmetic of NVIDIA's occupancy calculator."""

from __future__ import annotations

from typing import NamedTuple

from megatron_rlzero.kernels.tiles import round_up

#: compute capability -> bytes of shared memory of a multiprocessor; below, what is the same for all three. From the
#: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
REGISTERS, WARPS, PROGRAMS = 65_536, 64, 32
#: registers of a warp are given out in units
REGISTER_UNIT = 256
#: shared memory is given out in units, and the system keeps some for each program
SHARED_UNIT, RESERVED = 128, 1 << 10
#: columns of tensor memory of capability 10.0 (PTX ISA, tcgen05.alloc)
COLUMNS = 512


class Occupancy(NamedTuple):
    """Of a multiprocessor: programs at once, their share of the warps that it can hold, what there is no more of."""

    programs: int
    share: float
    limit: str


def occupancy(capability: int, registers: int, warps: int, shared: int, columns: int = 0) -> Occupancy:
    """Of a kernel; no programs where one does not fit.

    Args:
        registers: per thread.
        warps: per program, a multiple of four: a multiprocessor has four parts, over which they are spread evenly.
        shared: bytes per program.
        columns: of tensor memory, per program.
    """
    limits = {
        "registers": REGISTERS // round_up(32 * registers, REGISTER_UNIT) // warps,
        "shared memory": SHARED[capability] // (round_up(shared, SHARED_UNIT) + RESERVED),
        "tensor memory": COLUMNS // columns if columns else PROGRAMS,
        "warps": WARPS // warps,
        "programs": PROGRAMS,
    }
    limit = min(limits, key=limits.__getitem__)
    return Occupancy(limits[limit], limits[limit] * warps / WARPS, limit)
