"""Probes a policy with this project's kernels and with stock ones, and prints the two side by side.

Usage: python examples/quickstart/compare.py CONFIG RUN_DIR, after training: the policy is RUN_DIR/policy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def probe(config: str, run_dir: str, kernels: str) -> dict:
    """Runs ``megatron-rlzero probe`` and returns what it wrote; it exits with 1 where tokens differ."""
    command = ["probe", config, f"model.path={run_dir}/policy", f"run_dir={run_dir}", f"kernels={kernels}"]
    code = subprocess.run([sys.executable, "-m", "megatron_rlzero", *command]).returncode
    written = sorted(Path(run_dir).glob(f"probe-{kernels}-*/probe.json"))
    if code not in (0, 1) or not written:
        raise SystemExit(f"the probe with kernels={kernels} failed with exit code {code}")
    return json.loads(written[-1].read_text())


def main() -> int:
    config, run_dir = sys.argv[1:3]
    aligned, stock = (probe(config, run_dir, kernels) for kernels in ("aligned", "stock"))
    table = Table("same weights, learner against engine", "aligned", "stock", title="kernels")
    rows = {
        "tokens compared": lambda r: f"{r['tokens']}",
        "tokens whose log-prob differs in a byte": lambda r: f"{r['differing']}",
        "largest difference": lambda r: f"{r['largest']:.2e}",
        "operators that differ": lambda r: f"{len(r['layers']['differing'])} of {r['layers']['operators']}",
        "router choices that differ": lambda r: f"{r['layers']['router_choices']} of {r['layers']['routed']}",
    }
    for name, cell in rows.items():
        table.add_row(name, cell(aligned), cell(stock))
    Console(soft_wrap=True).print(table)
    return 0 if aligned["differing"] == 0 < stock["differing"] else 1


if __name__ == "__main__":
    sys.exit(main())
