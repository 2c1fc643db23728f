"""All learner ranks as one object on rank 0; on the other ranks, the loop that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.channel import Channel, Command
from megatron_rlzero.learner.learner import Learner, Step
from megatron_rlzero.rollout import Rollout

if TYPE_CHECKING:
    from megatron_rlzero.generation.refit import Refit, RefitStats


class Ranks:
    """Rank 0's handle: each method runs on every rank, in the same order.

    Args:
        learner: this rank's part.
        channel: to the other ranks.
        refit: the way to the servers; None where there are none.
    """

    def __init__(self, learner: Learner, channel: Channel, refit: Refit | None) -> None:
        self._learner, self._channel, self._refit = learner, channel, refit

    def step(self, batch: Batch, likelihood: bool = False) -> Step:
        """See Learner.step."""
        self._channel.send(Command("step", {"likelihood": likelihood}, batch.to_bytes()))
        return self._learner.step(batch, likelihood)

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See Learner.score."""
        self._channel.send(Command("score", {}, batch.to_bytes()))
        return self._learner.score(batch)

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probability of every token, fp32, one array per response."""
        log_pi = self.score(Batch.of(rollouts))[0].numpy()
        return np.split(log_pi, np.cumsum([len(r.tokens) for r in rollouts])[:-1])

    def push(self, version: int, servers: Sequence[str]) -> RefitStats:
        """Hands the present weights to these servers as ``version``, and forgets all others: they are gone."""
        self._channel.send(Command("push", {"version": version, "servers": servers}))
        self._refit.keep(servers)
        return self._refit.push(self._learner.weights.local, version)

    def push_first(self, version: int, server: str) -> RefitStats:
        """Hands the present weights to one server alone, which has just been attached."""
        self._channel.send(Command("push_first", {"version": version, "only": [server]}))
        return self._refit.push(self._learner.weights.local, version, [server])

    def attach(self, servers: Sequence[tuple[str, str, int]]) -> dict[str, str]:
        """Has further servers (name, url, workers) take part in refits; those that could not, and why."""
        self._channel.send(Command("attach", {}))
        return self._refit.add(servers)

    def export(self, directory: str) -> None:
        """Writes the policy as a Hugging Face directory."""
        self._channel.send(Command("export", {"directory": directory}))
        self._learner.weights.export(directory, self._learner.config.model.path)

    def save(self, directory: str) -> None:
        """Writes the training state into a directory that is there."""
        self._channel.send(Command("save", {"directory": directory}))
        self._learner.state.save(directory)

    def load(self, directory: str) -> None:
        """Takes the training state from what ``save`` wrote. CheckpointError on every rank, where it does not fit."""
        self._channel.send(Command("load", {"directory": directory}))
        self._learner.state.load(directory)

    def stop(self) -> None:
        """Lets the other ranks leave ``follow``, and waits until they have: their store may be this process's."""
        self._channel.send(Command("stop", {}))
        dist.barrier()


def follow(learner: Learner, channel: Channel, refit: Refit | None) -> None:
    """Other ranks: carries out what rank 0 says until it says stop."""
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 leads")
    while (command := channel.receive()).kind != "stop":
        match command.kind:
            case "step":
                learner.step(Batch.from_bytes(command.payload), **command.arguments)
            case "score":
                learner.score(Batch.from_bytes(command.payload))
            case "push":
                refit.keep(command.arguments["servers"])
                refit.push(learner.weights.local, command.arguments["version"])
            case "push_first":
                refit.push(learner.weights.local, **command.arguments)
            case "attach":
                refit.add([])
            case "export":
                learner.weights.export(command.arguments["directory"], learner.config.model.path)
            case "save":
                learner.state.save(command.arguments["directory"])
            case "load":
                learner.state.load(command.arguments["directory"])
            case kind:
                raise ValueError(f"rank 0 sent the unknown command {kind!r}")
    dist.barrier()
