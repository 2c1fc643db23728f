"""Several processes that write one directory: the first, whose store the others ask, stays until all have left."""

import os
import subprocess
import sys

from megatron_rlzero.generation.server import free_port
from megatron_rlzero.network import LOOPBACK

RANK = """
import sys, time
from megatron_rlzero.launch import ranks_store
from megatron_rlzero.resharding.team import Team

class Slow(Team):
    def ask(self, what):
        if what == "end":
            time.sleep(2)  # the first has long written all by then
        return super().ask(what)

team = Slow(*ranks_store())
with team.staged(sys.argv[1]) as partial:
    (partial / str(team.rank)).touch()
    team.gather(None)
"""


def test_the_first_stays_until_all_have_left(tmp_path):
    """Without a launcher its process holds the store: who asked it late would find nobody, and fail."""
    place = os.environ | {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    command = [sys.executable, "-c", RANK, tmp_path / "target"]
    ranks = [subprocess.Popen(command, env=place | {"RANK": str(rank)}) for rank in range(3)]
    try:
        assert [rank.wait(600) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert {file.name for file in (tmp_path / "target").iterdir()} >= {"0", "1", "2"}
