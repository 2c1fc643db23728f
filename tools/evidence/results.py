"""What the commands have in common at their end: the files in docs/results, and the options."""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from megatron_rlzero.kernels import libraries
from tools.evidence.runs import machine

ROOT = Path(__file__).resolve().parents[2]
BLUE, ORANGE, GREEN, GREY, INK = "#2a6fbb", "#d9730d", "#2e8b57", "#9aa5b1", "#222222"


def options(name: str, description: str) -> argparse.Namespace:
    """--out, where checkpoints are and the runs go on from; --results; --threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "evidence" / name, help="checkpoints")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="CSV, PNG and JSON")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    found = parser.parse_args()
    os.environ.update(libraries.settings())  # read at the first product
    torch.set_num_threads(found.threads)
    found.out.mkdir(parents=True, exist_ok=True)
    found.results.mkdir(parents=True, exist_ok=True)
    return found


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([f"{value:.3g}" if isinstance(value, float) else value for value in row] for row in rows)


def write_whole(path: Path, text: str) -> None:
    """Written beside, then renamed: what lies at ``path`` is always whole. Makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(text)
    os.replace(beside, path)


def write_json(path: Path, found: dict[str, object]) -> None:
    path.write_text(json.dumps({"kind": "one process", "machine": machine()} | found, indent=1) + "\n")
    print(f"{path.with_suffix('')}.csv, .png, .json")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
