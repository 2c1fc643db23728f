"""Three minutes of the fault drill: training goes on through kills, and nothing is lost, used twice or left behind."""

import json
import sys
from pathlib import Path

from tests.processes import run

DRILL = Path(__file__).parents[2] / "tools" / "fault_drill.py"


def test_training_survives_three_minutes_of_kills(tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--minutes", "3", "--every", "15", "--report", str(report)]
    done = run([sys.executable, DRILL, *arguments], 2400.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["faults"] == [] and len(found["kills"]) >= 3 and found["starts"][-1] > 0
