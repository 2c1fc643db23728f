"""The check of a GPU, on a CPU: what it writes and returns, that faults are reported, and how little it needs."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: imported by Python at the start of every process: other bits of few rows, a wrong value in bf16, a crash in fp32
FAULTS = """
import importlib.machinery, os, sys

class Planted:
    def find_spec(self, name, path, target=None):
        if name != "megatron_rlzero.kernels.reduction.triton":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def spoiled(module):
            execute(module)
            tree, row_sum = module.tree, module.row_sum
            module.tree = lambda x: tree(x) * (1.0 if x.shape[1] > 4 else 1.0 + 2**-20)
            module.row_sum = lambda x: os._exit(7) if x.element_size() == 4 else row_sum(x) * 1.05

        spec.loader.exec_module = spoiled
        return spec

sys.meta_path.insert(0, Planted())
"""


def run(out: Path, only: str, *flags: str, **environment: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, *flags, "-m", "tools.gpu_check", "--interpret", "--only", only, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    return done, json.loads((out / "results.json").read_text())


def packages(directory: Path) -> str:
    """A directory with torch, triton, numpy and what they require, and nothing else."""
    directory.mkdir()
    wanted, known = ["torch", "triton", "numpy"], set[str]()
    while wanted:
        name = wanted.pop()
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name not in known:
            known.add(name)
            wanted += [re.match(r"[\w.-]+", line)[0] for line in found.requires or () if "extra ==" not in line]
            for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
                if not (directory / top).exists():
                    (directory / top).symlink_to(found.locate_file(top))
    return str(directory)


def test_what_it_writes_with_torch_triton_and_numpy_alone(tmp_path):
    done, found = run(tmp_path / "out", "norm,reduction", "-S", PYTHONPATH=packages(tmp_path / "packages"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["ok"]
    environment, *results = found["results"]
    assert environment["checks"][0]["tiles"]["product"]["m"] > 0
    assert {(r["folder"], r["part"], r["dtype"]) for r in results} == {
        (folder, part, dtype)
        for folder in ("norm", "reduction")
        for part in ("operators", "invariance")
        for dtype in ("bf16", "fp32")
    }
    for result in results:
        assert result["checks"]
        for check in result["checks"]:
            if result["part"] == "operators":
                assert 0 <= check["error"] <= check["tolerance"]
            elif check["ok"] is not None:
                assert check["compared"] > 0
                assert check["differing"] == 0
                assert check["control"] > 0
    rows = next(r for r in results if r["part"] == "invariance" and r["name"] == "RMSNorm")
    assert {check["what"] for check in rows["checks"]} >= {"rows in every batch", "odd strides and addresses", "runs"}
    table = (tmp_path / "out" / "results.md").read_text()
    assert table.startswith("# Passed")
    assert "| RMSNorm of heads | fp32 |" in table
    assert "PASSED" in done.stdout


def test_faults_are_reported_and_stop_nothing_else(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    done, found = run(tmp_path / "out", "reduction", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert not found["ok"]
    wrong = {(r["part"], r["name"], r["dtype"]): r for r in found["results"] if not r["ok"]}
    value = wrong.pop(("operators", "sum over rows", "bf16"))["checks"][0]
    assert value["error"] > value["tolerance"]
    for dtype in ("bf16", "fp32"):
        checks = {check["what"]: check for check in wrong.pop(("invariance", "tree of slices", dtype))["checks"]}
        assert "first 3" in checks["rows in every batch"]["first"]
    for part in ("operators", "invariance"):
        assert "exit status 7" in wrong.pop((part, "sum over rows", "fp32"))["error"]
    assert wrong == {}
    assert len(found["results"]) == 9
    assert "NOT PASSED" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    hidden.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tools.gpu_check", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no GPU: torch" in done.stderr
    assert not (tmp_path / "out").exists()
