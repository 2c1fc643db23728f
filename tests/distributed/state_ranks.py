"""What the ranks of the training-state test run: learners, one after the other, that load, step and save.

Usage: python -m tests.distributed.state_ranks PLAN.json. The weights after a case lie in NAME.safetensors.
"""

import json
import sys
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
    source, target = settings.pop("load", None), settings.pop("save", None)
    learner = Learner(learner_config(model, out, world_size=dist.get_world_size(), **settings), device)
    if source:
        try:
            learner.state.load(out / source)
        except CheckpointError as error:
            (out / f"{name}-{dist.get_rank()}.txt").write_text(str(error))
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
