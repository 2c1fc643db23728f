"""What every Triton kernel takes of a GPU, as compiled for one that is not there, and the roofline of every operator.

Usage: python -m tools.aot_report [--results docs/results]. Compiles all calls of aot_calls.py for sm_80, sm_90 and
sm_100, in bf16 and fp32, prints tables, and writes aot_report.md, aot_kernels.csv and aot_roofline.csv. Minutes where
Triton's cache is empty. Nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn

from megatron_rlzero.kernels import tiles
from tools import aot
from tools.aot_calls import calls
from tools.evidence.results import write_csv, write_whole
from tools.occupancy import Occupancy, occupancy
from tools.roofline import report
from tools.tables import markdown, show

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADER = (
    "kernel", "dtype", "constants", "warps", "registers", "spilled bytes", "shared KiB", "16-bit loads", "products by",
    "programs per SM", "share of warps", "limit",
)  # fmt: skip
SHARE = "share of warps"
INTRODUCTION = """# Compiled kernels and roofline (no GPU)

`python -m tools.aot_report` writes this page, `aot_kernels.csv` and `aot_roofline.csv`. **Nothing here was measured,
and no GPU has run any of it.** The first part is what compilers say of the kernels, the second is a calculation."""


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture.

    Attributes:
        dtype: bf16 | fp32 | both, of the calls.
        columns: of tensor memory.
        narrow: instructions that load 16 bits of global memory.
    """

    call: str
    dtype: str
    found: aot.Compiled
    columns: int
    narrow: int

    @property
    def occupancy(self) -> Occupancy:
        x = self.found
        return occupancy(x.capability, x.registers, x.warps, x.shared, self.columns)

    def cells(self) -> list[object]:
        """In the order of HEADER."""
        x, held = self.found, self.occupancy
        sizes = (x.warps, x.registers, x.spills, x.shared / 1024, self.narrow, x.matrix)
        return [x.kernel, self.dtype, x.constants, *sizes, held.programs, held.share, held.limit]


def compiled(console: Console) -> list[Kernel]:
    """Every kernel of every call, as often as it is specialised."""
    todo = [(c, name, *call) for c in tiles.GPUS for name, dtype in DTYPES.items() for call in calls(dtype)]
    known: dict[str, aot.Compiled] = {}
    kernels = []
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[now]}"), console=console
    ) as bar:
        task = bar.add_task("compiling", total=len(todo), now="")
        for capability, dtype, name, call in todo:
            bar.update(task, now=f"sm_{capability} {dtype} {name}")
            with aot.compiling(capability) as launches:
                call()
            for (module, kernel, key), (made, options, _) in launches.items():
                if key not in known:
                    known[key] = aot._read(module, kernel, capability, made, options)
                narrow = made.asm["ptx"].count("ld.global.b16")
                kernels.append(Kernel(name, dtype, known[key], made.metadata.tmem_size, narrow))
            bar.advance(task)
    return kernels


def summarised(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Of specialisations with the same constants the one that takes most; one row where both dtypes take the same."""
    worst: dict[tuple[str, str, str], Kernel] = {}
    for x in kernels:
        key = (x.found.kernel, x.found.constants, x.dtype)
        worst[key] = max(worst.get(key, x), x, key=_taken)
    rows: dict[tuple[object, ...], Kernel] = {}
    for x in worst.values():
        key = (x.found, x.columns, x.narrow)
        rows[key] = replace(x, dtype="both") if key in rows else x
    return sorted(rows.values(), key=lambda x: (x.found.kernel, x.dtype, x.found.constants))


def _taken(x: Kernel) -> tuple[int, ...]:
    return -x.occupancy.programs, x.found.spills, x.narrow, x.found.registers, x.found.shared


def page(kernels: Sequence[Kernel]) -> str:
    """Markdown."""
    parts = [
        f"""## Kernels

Compiled with Triton {triton.__version__}, `ptxas` and `--fmad=false`; all {len(kernels)} kernels of all calls, as they
are specialised, are in [aot_kernels.csv](aot_kernels.csv). The tables have for each kernel, its constants and its dtype
the specialisation that takes most. Programs per SM and their share of its 64 warps follow from registers, shared
memory and, on sm_100, tensor memory by the rules of NVIDIA's occupancy calculator (`tools/occupancy.py`). A share says
how many warps there are to hide latencies, not how fast a kernel is. The programs of `product.product` are persistent,
at most one for each multiprocessor, whatever more of them would fit. *16-bit loads* are instructions of which each
thread reads two bytes of global memory; where addresses are known to be aligned, products read 16 bytes at a time, and
copy them while they compute (cp.async)."""
    ]
    for capability in tiles.GPUS:
        mine = [x for x in kernels if x.found.capability == capability]
        rows = summarised(mine)
        spilled = sorted({x.found.kernel for x in mine if x.found.spills})
        shares = [x.occupancy.share for x in rows]
        few = sorted({x.found.kernel for x in rows if x.occupancy.share < 0.125})
        parts.append(
            f"### sm_{capability}\n\n{len(rows)} rows; spills: {', '.join(spilled) or 'none'}. Shares of warps go from "
            f"{100 * min(shares):.3g}% to {100 * max(shares):.3g}%; below an eighth: {', '.join(few) or 'none'}.\n\n"
            + markdown(HEADER, [x.cells() for x in rows], SHARE)
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="where the files go")
    results, console = parser.parse_args().results, Console()
    console = console if console.is_terminal else Console(width=200)
    kernels = compiled(console)
    for capability in tiles.GPUS:
        rows = summarised(x for x in kernels if x.found.capability == capability)
        show(console, f"sm_{capability}, compiled", HEADER, [x.cells() for x in rows], SHARE)
    for (model, step), operators in report.steps().items():
        show(console, f"{model}, {step}, calculated", report.HEADER, report.rows(operators), report.SHARE)
    results.mkdir(parents=True, exist_ok=True)
    rows = [[x.call, f"sm_{x.found.capability}", *x.cells()] for x in kernels]
    write_csv(results / "aot_kernels.csv", ["call", "architecture", *HEADER], rows)
    rows = [[*name, *row] for name, operators in report.steps().items() for row in report.rows(operators)]
    write_csv(results / "aot_roofline.csv", ["model", "step", *report.HEADER], rows)
    write_whole(results / "aot_report.md", f"{INTRODUCTION}\n\n{page(kernels)}\n\n{report.page()}\n")
    console.print(f"{results / 'aot_report.md'}, aot_kernels.csv, aot_roofline.csv", highlight=False)


if __name__ == "__main__":
    main()
