"""The whole workflow as a user takes it, from a Hugging Face directory alone: every gate is passed."""

import json
import sys

import pytest

from megatron_rlzero.align.ledger import STEPS
from tests.processes import run
from tests.tiny import make_nemotron_h, make_qwen3, make_qwen3_moe

pytestmark = pytest.mark.full


@pytest.mark.parametrize("make", [make_qwen3, make_qwen3_moe, make_nemotron_h])
def test_every_gate_is_passed(tmp_path, make):
    model, out = make(tmp_path / "model"), tmp_path / "out"
    arguments = [sys.executable, "-m", "megatron_rlzero", "align", "all", str(model), "--out", str(out)]
    done = run(arguments, 2400.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all gates are passed\n")
    kept = json.loads((out / "alignment.json").read_text())["steps"]
    assert list(kept) == list(STEPS) and all(step["passed"] for step in kept.values())
    assert kept["check"]["values"]["first"] == {} and kept["check"]["values"]["tokens"] > 4000
    assert "Next: nothing" in (out / "alignment.md").read_text()
    arguments[arguments.index("all")] = "accept"
    assert run(arguments, 120.0).stdout.startswith("accepted: ")
