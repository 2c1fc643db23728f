"""What the ranks of a distributed test run: every case of a JSON file in one process group, results beside it.

Usage: python ranks.py CASES.json. A case names its layout, and its model if that is not the plan's; its results are
NAME.safetensors (gradients of the first step as grad.*, weights after three steps as weight.*) and NAME.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.build import initialise_distributed, make_parallel_groups
from megatron_rlzero.learner.learner import Learner
from tests.tiny import learner_config, rollouts


def run(case: dict, model: Path, out: Path, device: torch.device) -> None:
    settings = dict(case)
    name, likelihood = settings.pop("name"), settings.pop("likelihood", False)
    checkpoint = settings.pop("checkpoint", None)
    advantages = torch.linspace(-1.5, 1.0, 12)
    batch = Batch.of(rollouts(12), torch.ones(12) if likelihood else advantages)
    learner = Learner(learner_config(model, out, world_size=dist.get_world_size(), **settings), device)
    if checkpoint:
        learner.weights.load(checkpoint)
        learner.parts.optimizer.reload_model_params()
    log_pi, entropy = learner.score(batch)
    tensors: dict[str, torch.Tensor] = {"log_pi": log_pi, "entropy": entropy}
    if not settings.get("optimizer_use_distributed_optimizer"):
        learner.backward(batch, likelihood)
        gradients = learner.weights.assemble(learner.weights.gradients())
        tensors |= {f"grad.{n}": g for n, g in (gradients or {}).items()}
    steps = [learner.step(batch, likelihood) for _ in range(3)]
    weights = learner.weights.assemble()
    learner.weights.export(out / name, model)
    if dist.get_rank() == 0:
        save_file(tensors | {f"weight.{n}": w for n, w in weights.items()}, out / f"{name}.safetensors")
        values = [
            {"loss": s.gradients.loss, "grad_norm": s.grad_norm, "microbatches": s.gradients.microbatches}
            for s in steps
        ]
        (out / f"{name}.json").write_text(json.dumps({"steps": values, "config": asdict(learner.config)}))
    dist.barrier()


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    model, out = Path(plan["model"]), Path(plan["out"])
    device, _ = initialise_distributed(learner_config(model, out))
    for case in plan["cases"]:
        parallel_state.destroy_model_parallel()
        sizes = {k: v for k, v in case.items() if k.endswith("parallel_size")}
        make_parallel_groups(learner_config(model, out, **sizes).learner)
        run({k: v for k, v in case.items() if k != "model"}, Path(case.get("model", model)), out, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
