"""The learner's side of a job: it scores, is watched and traced, and takes gradients and steps.

Usage, by ``job.run_learner``: python -m megatron_rlzero.align.learner PLAN.json, on every rank. Kinds: ``map`` watches
what computes, ``trace`` keeps operators' outputs and ``outputs`` those of given modules, ``score`` scores what the
engine sampled, ``steps`` trains on random responses, ``time`` times operators.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rlzero.align.documents import responses
from megatron_rlzero.align.job import Job, Task
from megatron_rlzero.align.watch import Clock, Watch
from megatron_rlzero.architectures import architecture
from megatron_rlzero.invariance.trace import Recorder
from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.build import initialise_distributed, make_parallel_groups
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.rollout import Rollout


def documents(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]] | None = None) -> list[Rollout]:
    """Prompts with the answers as their action tokens, without log-probs."""
    made = []
    for n, prompt in enumerate(prompts):
        answer = list(answers[n]) if answers is not None else []
        action = np.arange(len(prompt) + len(answer)) >= len(prompt)
        tokens, none = np.array([*prompt, *answer], np.int32), np.zeros(len(action), np.float32)
        made.append(Rollout(0, n, 0, tokens, action, none, np.where(action, 0, -1).astype(np.int32), 0.0, "stop"))
    return made


def score(learner: Learner, task: Task, out: Path) -> dict[str, Tensor]:
    """``log_pi``, fp32 [prompts, new], of the answers in the file of the engine's task ``sampled``."""
    answers = load_file(out / f"engine-{task['sampled']}.safetensors")["tokens"]
    batch = Batch.of(documents(task["prompts"], answers.tolist()))
    log_pi, _ = learner.score(batch)
    return {"log_pi": log_pi[batch.action_mask].view(answers.shape)}


def trace(learner: Learner, task: Task) -> dict[str, Tensor]:
    """Operator -> its output for the prompts, each alone in a microbatch."""
    recorder = Recorder()
    for point in architecture(learner.hf).trace_points(learner.hf):
        recorder.watch(point.name, learner.parts.policy.get_submodule(point.learner), point.from_learner)
    _one_by_one(learner, recorder, task["prompts"])
    return recorder.joined()


def outputs(learner: Learner, task: Task) -> dict[str, Tensor]:
    """Module -> its output for the prompts, of the modules in ``modules``; sequences' first dimension are tokens."""
    recorder = Recorder()
    for name in task["modules"]:
        recorder.watch(name, learner.parts.policy.get_submodule(name), _first)
    _one_by_one(learner, recorder, task["prompts"])
    return recorder.joined()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _one_by_one(learner: Learner, recorder: Recorder, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        recorder.length = len(prompt)
        learner.score(Batch.of(documents([prompt])))
    recorder.close()


def steps(learner: Learner, task: Task) -> dict[str, Tensor]:
    """Steps of the optimizer on the same random responses; every tensor whole, on rank 0.

    Returns:
        log_pi.0, fp32 [tokens], of the first step; for each step n = 0, 1, ... loss.n, norm.n, rate.n; grad.n.TENSOR as
        the optimizer got it; weight.n.TENSOR before it and weight.STEPS.TENSOR at last.
    """
    drawn = responses(learner.hf["vocab_size"], learner.hf["max_position_embeddings"])
    batch, found = Batch.of(drawn.rollouts, drawn.advantages), {}
    for n in range(task["steps"]):
        weights = learner.weights.assemble()
        done = learner.step(batch)
        gradients = learner.weights.assemble(learner.weights.gradients())
        values = {"loss": done.gradients.loss, "norm": done.grad_norm, "rate": done.learning_rate}
        found |= {f"{name}.{n}": torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        found |= {f"log_pi.{n}": done.gradients.log_pi}
        found |= {f"weight.{n}.{name}": w for name, w in (weights or {}).items()}
        found |= {f"grad.{n}.{name}": g for name, g in (gradients or {}).items()}
    weights = learner.weights.assemble()
    return found | {f"weight.{task['steps']}.{name}": w for name, w in (weights or {}).items()}


def timed(learner: Learner, task: Task) -> dict[str, Any]:
    """Seconds of each module's forward passes, and of whole steps, the shortest of ``steps``."""
    drawn = responses(learner.hf["vocab_size"], learner.hf["max_position_embeddings"])
    batch = Batch.of(drawn.rollouts, drawn.advantages)
    learner.score(batch)
    clock = Clock(learner.parts.policy)
    learner.score(batch)
    clock.close()
    seconds = []
    for _ in range(task["steps"]):
        begun = time.perf_counter()
        learner.step(batch)
        seconds.append(time.perf_counter() - begun)
    return {"modules": clock.found(), "step": min(seconds), "tokens": len(batch.tokens)}


def mapped(learner: Learner, task: Task) -> dict[str, Any]:
    watch = Watch(learner.parts.policy)
    learner.score(Batch.of(documents(task["prompts"])))
    watch.close()
    return watch.found()


def execute(job: Job, task: Task, device: torch.device) -> None:
    """Does one task and writes its file; collective over the ranks."""
    config = job.configured(task)
    parallel_state.destroy_model_parallel()
    make_parallel_groups(config.learner)
    learner, out = Learner(config, device), job.out / f"learner-{task['name']}"
    match task["kind"]:
        case "map" | "time":
            found = {"map": mapped, "time": timed}[task["kind"]](learner, task)
            Path(f"{out}.json").write_text(json.dumps(found))
        case "score":
            _save(score(learner, task, job.out), out)
        case kind:
            _save({"trace": trace, "outputs": outputs, "steps": steps}[kind](learner, task), out)


def main(do: Callable[[Job, Task, torch.device], None] = execute) -> None:
    job = Job.read(sys.argv[1])
    device, _ = initialise_distributed(job.config)
    for task in job.tasks:
        do(job, task, device)
    dist.destroy_process_group()


def _save(tensors: dict[str, Tensor], out: Path) -> None:
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{out}.safetensors")
    dist.barrier()


if __name__ == "__main__":
    main()
