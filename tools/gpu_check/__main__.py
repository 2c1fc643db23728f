"""Checks every operator on one GPU: values against float64, bits that nothing may change, times beside torch's.

Usage, in the checkout: ``python -m tools.gpu_check [--out DIR]``. It needs torch, triton and numpy, takes less than
eight minutes, and leaves results.json and results.md in DIR. Exit status: 0 if every check was made and passed, 1 if
not, 2 if there is no GPU. With --interpret, or TRITON_INTERPRET=1, it checks tiny sizes on a CPU and times nothing.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

#: seconds after the budget at which what still runs is ended
GRACE = 45.0
#: processes that check at a time: most of what they wait for is the compiler
WORKERS = 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__.splitlines()[0])
    out = Path("runs/gpu_check")
    parser.add_argument("--out", type=Path, default=out, help="of results.json and results.md; made (%(default)s)")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds after which nothing begins (%(default)s)")
    parser.add_argument("--only", default="", help="folders of kernels/ with commas between, as in linear,norm")
    parser.add_argument("--workers", type=int, default=0, help=f"processes that check at a time ({WORKERS} on a GPU)")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes under Triton's interpreter, on a CPU")
    options, begin = parser.parse_args(), time.monotonic()
    if options.workers < 0:
        parser.error(f"--workers {options.workers}: expected is a number of processes, or 0 for the default")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else torch refuses its own products beside poisoned memory
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, here and in other processes

    import torch

    from megatron_rlzero.kernels.backend import INTERPRETED

    if not INTERPRETED and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds no CUDA device (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); --interpret checks tiny sizes on a CPU",
            file=sys.stderr,
        )
        return 2

    from tools.gpu_check import pool, report
    from tools.gpu_check.environment import asked
    from tools.gpu_check.jobs import FOLDERS, jobs

    only = [name.strip() for name in options.only.split(",")] if options.only else FOLDERS
    if unknown := set(only) - set(FOLDERS):
        parser.error(f"--only {', '.join(unknown)}: expected are some of {', '.join(FOLDERS)}")
    shared = not INTERPRETED and "Exclusive" not in asked("compute_mode").get("compute_mode", "")
    workers = options.workers or (min(WORKERS, os.cpu_count() or 1) if shared else 1)
    chosen = [job for job in jobs() if job.folder in ("", *only)]
    groups = [[job.key for job in chosen if job.part == "environment"]]
    groups += [[job.key for job in chosen if job.folder == folder and job.part != "times"] for folder in FOLDERS]
    if INTERPRETED:
        groups = [list(itertools.chain(*groups))]  # a process takes as long to begin as several of the jobs
    timed = [job.key for job in chosen if job.part == "times"]
    settings = {"budget": options.budget, "only": list(only), "workers": workers, "interpreted": INTERPRETED}

    options.out.mkdir(parents=True, exist_ok=True)
    found, limits = list[report.Result](), (begin + options.budget, begin + options.budget + GRACE)
    checks = pool.results([group for group in groups if group], workers, *limits)
    times = pool.results([timed] if timed else [], 1, *limits)  # alone on the GPU, after the checks
    for result in itertools.chain(checks, times):
        found.append(result)
        print(report.line(result), flush=True)
        report.write(options.out, found, {**settings, "seconds": time.monotonic() - begin})
        if result["part"] == "environment" and not result["ok"]:
            break  # such as a GPU that there are no tiles for
    failed = sum(result["ok"] is False for result in found)
    skipped = sum(result["ok"] is None for result in found)
    print(
        f"{'PASSED' if report.passed(found) else 'NOT PASSED'}: {len(found)} jobs, {failed} failed, {skipped} skipped, "
        f"{time.monotonic() - begin:.0f} s; {options.out / 'results.md'}"
    )
    return 0 if report.passed(found) else 1


if __name__ == "__main__":
    sys.exit(main())
