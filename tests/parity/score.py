"""What the learner's ranks run: they score the sequences of engine results, for every case of a JSON file.

Usage: python -m tests.parity.score CASES.json. A case names a file of ``engine.Results``, a model and a layout; its
result is OUT/NAME.safetensors with ``log_pi``, fp32 [responses' tokens], as Results has them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megatron_rlzero.learner.batch import Batch
from megatron_rlzero.learner.build import initialise_distributed, make_parallel_groups
from megatron_rlzero.learner.learner import Learner
from megatron_rlzero.rollout import Rollout
from tests.parity.engine import Results
from tests.tiny import learner_config


def batch_of(results: Results) -> tuple[Batch, torch.Tensor]:
    """The sequences for scoring, and bool [tokens], True at the responses' tokens."""
    rollouts = []
    for tokens, prompt in zip(results.tokens.split(results.lengths.tolist()), results.prompts.tolist(), strict=True):
        n = len(tokens)
        action = np.arange(n) >= prompt
        zeros = np.zeros(n, np.float32)
        rollouts.append(Rollout(0, 0, 0, tokens.numpy(), action, zeros, np.where(action, 0, -1), 0.0, "stop"))
    return Batch.of(rollouts), torch.from_numpy(np.concatenate([r.action_mask for r in rollouts]))


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    device, _ = initialise_distributed(learner_config(out, out, expert_model_parallel_size=1))
    for case in plan["cases"]:
        settings = {k: v for k, v in case.items() if k not in ("name", "results", "model", "reduction_slices")}
        settings.setdefault("expert_model_parallel_size", 1)
        config = learner_config(Path(case["model"]), out, world_size=dist.get_world_size(), **settings)
        config.reduction_slices = case.get("reduction_slices", 4)
        parallel_state.destroy_model_parallel()
        make_parallel_groups(config.learner)
        batch, responses = batch_of(Results.read(Path(case["results"])))
        log_pi, _ = Learner(config, device).score(batch)
        if dist.get_rank() == 0:
            save_file({"log_pi": log_pi[responses].contiguous()}, out / f"{case['name']}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
