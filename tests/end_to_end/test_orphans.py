"""No process of an engine outlives the one that started it, even where that dies during the start."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.processes import command, survivors, wait_for


@pytest.mark.parametrize("kill", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_no_process_outlives_its_parent(kill: signal.Signals, make_config, tmp_path: Path) -> None:
    """Killed while the engine core is starting, before vLLM has loaded any plugin there."""
    stored = tmp_path / "config.pickle"
    stored.write_bytes(pickle.dumps(make_config()))
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import pickle, sys
            from megatron_rlzero.generation.engine import RolloutEngine
            engine = RolloutEngine(pickle.load(open(sys.argv[1], "rb")))
            try:
                engine.wait_ready()
                engine.take(0)
            finally:
                engine.close()
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script), str(stored)], start_new_session=True)
    try:

        def begun() -> list[psutil.Process]:
            """The parent's processes, once the engine core is one of them."""
            assert parent.poll() is None
            found = psutil.Process(parent.pid).children(recursive=True)
            return found if any("spawn_main" in command(process) for process in found) else []

        family = wait_for(begun, 240.0)
        assert len(family) >= 3  # API server, client, engine core
        os.killpg(parent.pid, kill)
        parent.wait(40.0)
        assert survivors(family, 40.0) == []  # a thread has to wait while a long import holds the interpreter
    finally:
        if parent.poll() is None:
            parent.kill()
