"""A fake engine, fake ranks and a fake log for tests of the loop, in one object that writes down what it is asked."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_rlzero import loop
from megatron_rlzero.checkpoint import Saved
from megatron_rlzero.config import Config
from megatron_rlzero.generation.engine import BadServer
from megatron_rlzero.rollout import Rollout


def rollout(update, item, sample=0, reward=1.0, version=0, failed=False, prompt=2, actions=3):
    action = np.arange(prompt + (0 if failed else actions)) >= prompt
    return Rollout(
        update=update,
        item=item,
        sample=sample,
        tokens=np.arange(len(action), dtype=np.int32),
        action_mask=action,
        logprobs=np.where(action, -1.5, 0).astype(np.float32),
        versions=np.where(action, version, -1).astype(np.int32),
        reward=reward,
        finish_reason="failed" if failed else "stop",
        info={"start": 10.0 * update + sample, "end": 10.0 * update + sample + 2.5},
    )


@dataclass
class World:
    """Engine, ranks and log in one, that write down what they are asked; ``accuracy`` is by version."""

    accuracy: dict[int, float] = field(default_factory=dict)
    mismatch: float = 0.0
    calls: list = field(default_factory=list)
    version: int = -1
    weights: int = 0
    batches: list = field(default_factory=list)
    metrics: dict = field(default_factory=dict)
    evaluations: dict = field(default_factory=dict)
    waiting: list = field(default_factory=list)
    faults: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)
    prompts: int = 40

    # engine
    def set_version(self, version):
        self.calls.append(("set_version", version))
        self.version = version

    def take(self, update, admit=None):
        if self.waiting:
            admit()
        self.calls.append(("take", update))
        return [rollout(update, item, reward=float(item % 2), version=min(self.version, update)) for item in range(4)]

    def finished(self, update):
        return [rollout(update, 3), rollout(update + 1, 0)]

    def refitted(self):
        return ["server-0"]

    def joining(self):
        return list(self.waiting)

    def attach(self, who):
        if isinstance(who, list):  # of the ranks
            self.calls.append(("connect", *(name for name, _, _ in who)))
            return {name: self.faults["connect"] for name, _, _ in who if "connect" in self.faults}
        self.calls.append(("attach", who.name))
        self.waiting.remove(who)
        return "lost" not in self.faults

    def turn_away(self, server, reason):
        self.calls.append(("turn away", server.name, reason))
        self.waiting.remove(server)

    def evaluate(self, greedy, admit=None):
        self.calls.append(("greedy" if greedy else "sampled", self.version))
        accuracy = self.accuracy.get(self.version, 0.0)
        return [rollout(-1, i, reward=float(i < accuracy * 10), version=self.version) for i in range(10)]

    # ranks
    def push(self, version, servers):
        assert version == self.weights  # what is pushed are the weights of that version
        assert servers == self.refitted()
        self.calls.append(("push", version))
        return SimpleNamespace(seconds=0.25, bytes=1000, detached={})

    def push_first(self, version, server):
        assert version == self.weights
        self.calls.append(("push", version, server))
        detached = {server: self.faults["push"]} if "push" in self.faults else {}
        return SimpleNamespace(seconds=0.25, bytes=1000, detached=detached)

    def save(self, directory):
        self.calls.append(("save", self.weights))
        (Path(directory) / "weights").write_text(str(self.weights))
        save_file({"main/a/0": torch.zeros(1)}, Path(directory) / "rank-00000.safetensors")

    def load(self, directory):
        self.weights = int((Path(directory) / "weights").read_text())
        self.calls.append(("load", self.weights))

    def score(self, batch):
        self.calls.append(("score", self.weights))
        values = torch.where(batch.action_mask, -1.5 + self.mismatch, 0.0)
        return values, torch.ones_like(values)

    def step(self, batch):
        self.calls.append(("step", self.weights))
        self.batches.append(batch)
        values, entropies = torch.where(batch.action_mask, -1.25, 0.0), torch.full(batch.tokens.shape, 0.5)
        self.weights += 1
        gradients = SimpleNamespace(loss=-0.5, microbatches=2, log_pi=values, entropy=entropies)
        return SimpleNamespace(gradients=gradients, grad_norm=0.5, clipped=True, stepped=True, learning_rate=1e-3)

    def export(self, directory):
        self.calls.append(("export", directory.rsplit("/", 1)[-1], self.weights))

    # log
    def update(self, update, metrics):
        self.calls.append(("log", update))
        self.metrics[update] = metrics

    def evaluation(self, version, metrics, greedy):
        self.calls.append(("log evaluation", version))
        self.evaluations[version] = metrics

    # ranks and engine, for the probe
    def score_rollouts(self, rollouts):
        self.calls.append(("score", self.weights))
        return [np.where(r.action_mask, -1.5 + self.mismatch, 0).astype(np.float32) for r in rollouts]

    def begin_evaluation(self, greedy, prompts, samples, concurrency, server=None):
        self.calls.append(("probe", self.version, prompts) if server is None else ("probe", server))
        return prompts

    def finish_evaluation(self, request, admit=None):
        if self.calls[-1][1] == self.faults.get("probe"):
            raise BadServer("it is gone")
        return [rollout(-1, i, version=self.version) for i in range(request)]

    def note(self, text):
        self.notes.append(text)

    def sizes(self):
        return {"metrics.jsonl": len(self.metrics)}

    def run(self, saved=None, **settings):
        loop.train(config(**settings), self, self, self, saved or Saved())
        return self

    def of(self, *kinds):
        return [call for call in self.calls if call[0] in kinds]


def config(**settings):
    made = Config(run_dir="/nowhere/run")
    made.loop.updates, made.loop.prompts_per_update = 3, 4
    made.probe.every, made.probe.on_mismatch = 0, "log"
    for key, value in settings.items():
        section, name = key.split("_", 1)
        setattr(getattr(made, section), name, value)
    return made
