"""A learner in four parts hands its weights to servers of one and of two workers: parameters and samples compared."""

import re
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_refits_put_every_element_where_it_belongs():
    command = [sys.executable, "tools/check_refit.py", "2", "2", "2", "4"]
    done = run(command, 1800.0, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (counts,) = re.findall(r"3 refits, (\d+) parameters compared, (\d+) differ", done.stdout)
    assert int(counts[0]) > 500 and counts[1] == "0"
    (counts,) = re.findall(
        r"48 responses .*: (\d+) differ between servers .*, (\d+) between 48 .*, (\d+) between", done.stdout
    )
    assert counts[:2] == ("0", "0") and int(counts[2]) > 40
