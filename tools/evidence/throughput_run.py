"""A run of the whole stack with drawn response lengths, its parts on cores of their own; and its server's step time.

``python -m tools.evidence.throughput_run CONFIG KIND MEAN CORE a.b=c ...`` trains as ``megatron-rlzero train`` does,
with the client of drawn_client.py. What a rank spawns (server, client, its graders) runs on CORE, "any" for no pinning;
the rank itself is where this command was started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.tiny_run import CONFIG

if TYPE_CHECKING:
    from megatron_rlzero.config import Config

#: so wide that the products of a token outweigh what an operator costs in Python; and room for long responses
MODEL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 4096,
}


@contextlib.contextmanager
def on(core: int | None) -> Iterator[None]:
    """This thread, and what it starts meanwhile, runs on ``core`` alone; None changes nothing."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def drawn(kind: str, mean: int, core: int | None) -> Iterator[None]:
    """This process spawns its children on ``core``, and the drawn client in the place of the client."""
    from megatron_rlzero.generation import server

    spawn = server.spawn

    def drawn_spawn(module: str, arguments: list[str], *rest, **more):
        if module == "megatron_rlzero.generation.client":
            module, arguments = "tools.evidence.drawn_client", [*arguments, kind, str(mean)]
        with on(core):
            return spawn(module, arguments, *rest, **more)

    server.spawn = drawn_spawn
    try:
        yield
    finally:
        server.spawn = spawn


def step_times(config: Config, sizes: Sequence[int], repeats: int) -> list[dict[str, float]]:
    """Seconds in which a server answers b responses of n tokens each that are all asked for at once.

    Nothing else runs. Each b is measured ``repeats`` times with two lengths, whatever the order of the sizes, after a
    round that is left out. To be called inside ``drawn``.

    Returns:
        {"b", "n", "seconds"} each.
    """
    from megatron_rlzero.generation.engine import RolloutEngine
    from megatron_rlzero.loop import sampling_interval

    engine = RolloutEngine(config)
    points = []
    try:
        engine.wait_ready()
        engine.label_weights(0)
        for repeat in range(repeats + 1):
            for b in sizes:
                for greedy in (False, True):
                    rollouts = engine.finish_evaluation(engine.begin_evaluation(greedy, b, 1, 0))
                    began, ended = sampling_interval(rollouts)
                    if repeat:
                        (n,) = {r.action_tokens for r in rollouts}
                        points.append({"b": b, "n": n, "seconds": ended - began})
    finally:
        engine.close()
    return points


def make_model(directory: Path) -> Path:
    """The quick start's model with random weights, MODEL in the place of its sizes; made once."""
    sys.path.insert(0, str(CONFIG.parent))
    import prepare
    from transformers import PreTrainedTokenizerFast

    if not (directory / "model.safetensors").exists():
        directory.mkdir(parents=True, exist_ok=True)
        size = prepare.make_tokenizer(directory)
        end = PreTrainedTokenizerFast.from_pretrained(directory).convert_tokens_to_ids(prepare.END)
        hf = json.loads(CONFIG.with_suffix(".json").read_text())
        prepare.make_model(directory, hf | MODEL, size, end, seed=0)
    return directory


def main() -> int:
    from megatron_rlzero.launch import is_rank, launch, launcher
    from megatron_rlzero.validation import load
    from megatron_rlzero.watch import killed_with

    config, kind, mean, core, *overrides = sys.argv[1:]
    if not is_rank():
        world_size = load(config, overrides).learner.world_size
        return launch(["-m", "tools.evidence.throughput_run", *sys.argv[1:]], world_size)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    killed_with(launcher())
    from megatron_rlzero.run import train

    with drawn(kind, int(mean), None if core == "any" else int(core)):
        train(load(config, overrides, starting=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
