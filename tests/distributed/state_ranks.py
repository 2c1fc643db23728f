"""What the ranks of the training-state test run: learners, one after the other, that load, step and save.

Usage: python -m tests.distributed.state_ranks PLAN.json. The weights after a case lie in NAME.safetensors.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.build import initialise_distributed, make_parallel_groups
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.resharding.directories import CheckpointError
from tests.tiny import learner_config, rollouts


def run(case: dict, model: Path, out: Path, device: torch.device) -> None:
    settings = dict(case)
    name, first, stop = settings.pop("name"), settings.pop("first"), settings.pop("stop")
    source, target, refuses = (settings.pop(key, None) for key in ("load", "save", "refuses"))
    learner = Learner(learner_config(model, out, world_size=dist.get_world_size(), **settings), device)
    if source:
        try:
            learner.state.load(out / source)
        except CheckpointError as error:
            (out / f"{name}-{dist.get_rank()}.txt").write_text(str(error))
            return
    if refuses:
        (out / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(refusals(learner)))
        return
    rates = [
        learner.step(Batch.of(rollouts(8, seed=update), torch.linspace(-1.5, 1.0, 8))).learning_rate
        for update in range(first, stop)
    ]
    if target:
        if dist.get_rank() == 0:
            (out / target).mkdir()
        dist.barrier()
        learner.state.save(out / target)
    weights = learner.weights.assemble()
    if dist.get_rank() == 0:
        save_file(weights, out / f"{name}.safetensors")
        (out / f"{name}.json").write_text(json.dumps(rates))
    dist.barrier()


def refusals(learner: Learner) -> dict:
    """A batch without an action token, and ratios that overflow: what is said, and whether the state is as before."""

    def state() -> list[torch.Tensor]:
        held = [values.clone() for name in learner.weights.local for _, values in learner.state._values(name, steps=1)]
        return [*held, torch.tensor(learner.parts.scheduler.num_steps)]

    def same() -> bool:
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, state(), strict=True))

    before, found = state(), {}
    batch = Batch.of(rollouts(8), torch.linspace(-1.5, 1.0, 8))
    empty = learner.step(replace(batch, action_mask=torch.zeros_like(batch.action_mask)))
    found["empty"] = [empty.stepped, empty.grad_norm, empty.gradients.loss, same()]
    token = int(batch.starts[5]) + int(batch.action_mask[int(batch.starts[5]) :].int().argmax())
    for name, value in (("overflow", -200.0), ("nan", torch.nan)):
        log_mu = batch.log_mu.clone()
        log_mu[token] = value
        try:
            learner.step(replace(batch, log_mu=log_mu))
        except FloatingPointError as error:
            found[name] = [str(error), same()]
    learner.step(batch)
    found["control"] = same()
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    device, _ = initialise_distributed(learner_config(Path(plan["model"]), out))
    for case in plan["cases"]:
        parallel_state.destroy_model_parallel()
        sizes = {k: v for k, v in case.items() if k.endswith("parallel_size")}
        make_parallel_groups(learner_config(Path(plan["model"]), out, **sizes).learner)
        run({k: v for k, v in case.items() if k != "model"}, Path(case.get("model", plan["model"])), out, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
