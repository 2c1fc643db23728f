"""One rank of a training run: builds its part of the learner; rank 0 also starts the servers and leads the loop."""

from __future__ import annotations

import os

import torch.distributed as dist

from megatron_rlzero import loop
from megatron_rlzero.config import Config
from megatron_rlzero.generation.engine import RolloutEngine
from megatron_rlzero.generation.refit import Refit
from megatron_rlzero.learner.build import DTYPES, initialise_distributed
from megatron_rlzero.learner.channel import Channel
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.learner.ranks import Ranks, follow
from megatron_rlzero.metrics import RunLog
from megatron_rlzero.watch import end_with


def run(config: Config) -> None:
    """Trains as ``config`` says; called on every rank that ``launch`` or torchrun has started.

    Raises:
        RuntimeError: on rank 0, naming the server or process that died; the launcher ends the other ranks.
        FloatingPointError: on every rank: the update would not have been finite.
    """
    end_with(os.getppid())
    if int(os.environ["RANK"]) == 0:
        _lead(config)
    else:
        learner, channel, refit = _join(config, [])
        follow(learner, channel, refit)
    dist.destroy_process_group()


def _lead(config: Config) -> None:
    with RunLog(config) as log:
        engine = RolloutEngine(config)
        try:
            engine.wait_ready()
            learner, channel, refit = _join(config, [(s.name, s.url, s.workers) for s in engine.servers])
            ranks = Ranks(learner, channel, refit)
            loop.train(config, ranks, engine, log)
            ranks.stop()
        finally:
            engine.close()


def _join(config: Config, servers: list[tuple[str, str, int]]) -> tuple[Learner, Channel, Refit]:
    """Collective: the learner, and the way from its ranks to the servers, which rank 0 knows."""
    device, store = initialise_distributed(config.learner)
    learner = Learner(config, device)
    weights = learner.weights
    refit = Refit(
        servers,
        dist.get_rank(),
        dist.get_world_size(),
        weights.layout,
        weights.shapes,
        DTYPES[config.model.dtype],
        store,
        config.refit.deadline_s,
    )
    return learner, Channel(store), refit
