"""Runs vLLM in this process on the prompts of a plan, in several ways, and writes tokens and log-probs.

Usage: python -m tests.parity.engine PLAN.json, in the environment of ``generation.server.environment``. Runs one after
the other with equal ``engine`` settings share an engine; a run's results are OUT/NAME.safetensors, see ``Results``.
"""

import functools
import json
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rlzero.align import engine
from megatron_rlzero.align.engine import log_probs
from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.layouts import engine_layout
from megatron_rlzero.config import Config
from megatron_rlzero.invariance.vllm import BACKEND, Settings
from megatron_rlzero.resharding.transport import TRANSFORMS


@dataclass
class Results:
    """What a run gave for its prompts, one after the other.

    Attributes:
        tokens: int32, prompts and responses; lengths, prompts: int64, tokens of each sequence and of its prompt.
        together, alone, prefill: fp32, log-probs of the responses' tokens: all at once; one request after the other,
            NaN where it was not run; as prompt log-probs of one prefill.
        alone_tokens: int32, sampled alone, -1 where it was not run.
        switched: int64, how many tokens of each response the old weights sampled; empty without an update.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
    together: Tensor
    alone: Tensor
    alone_tokens: Tensor
    prefill: Tensor
    switched: Tensor

    @staticmethod
    def read(path: Path) -> "Results":
        return Results(**load_file(path))

    def responses(self) -> Tensor:
        """int32, the responses' tokens, aligned with the log-probs."""
        return torch.cat([s[p:] for s, p in zip(self.tokens.split(self.lengths.tolist()), self.prompts, strict=True)])


def sampling(run: dict, n: int, **settings: Any):
    return engine.sampling(run["new_tokens"], n, **settings)


def build(model: str, dtype: str, tp: int = 1, chunk: int = 2048, prefix_caching: bool = False, length: int = 256):
    config = Config(kernels=Settings.from_environment().kernels)
    config.model.path, config.model.dtype, config.rollout.tensor_model_parallel_size = model, dtype, tp
    return engine.build(config, length, chunk, prefix_caching, weight_transfer_config={"backend": BACKEND})


def generate(llm, run: dict, which: list[int]) -> list:
    return engine.generate(llm, run["prompts"], which, run["new_tokens"])


def stage(transfer, directory: Path) -> None:
    """Leaves a checkpoint in the transfer engine of the only worker, as a refit's transfers would."""
    from megatron_rlzero.invariance.vllm_checks import parameters

    hf, tensors = read_config(directory), load_file(directory / "model.safetensors")
    transfer.aligned, transfer.parameters = True, parameters(transfer.model)
    transfer.staged = {name: torch.zeros_like(parameter) for name, parameter in transfer.parameters.items()}
    for piece in engine_layout(architecture(hf), hf, 1)[0]:
        value = tensors[piece.tensor][piece.box.slices]
        transfer.staged[piece.local][piece.local_box.slices] = TRANSFORMS.get(piece.transform, lambda x: x)(value)


def update_in_flight(llm, run: dict, steps: int) -> tuple[list, list[int]]:
    """All requests at once; after ``steps`` steps of the engine, other weights, the cache forgotten."""
    core = llm.llm_engine.engine_core.engine_core
    for n, prompt in enumerate(run["prompts"]):
        llm.llm_engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling(run, n))
    for _ in range(steps):
        llm.llm_engine.step()
    switched = {request.request_id: len(request.output_token_ids) for request in core.scheduler.requests.values()}
    core.pause_scheduler("keep", True)
    transfer = core.model_executor.driver_worker.worker.weight_transfer_engine
    stage(transfer, Path(run["update"]))
    transfer.finish_weight_update()
    core.resume_scheduler()
    finished = {}
    while llm.llm_engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step() if output.finished}
    numbers = sorted(finished, key=int)
    return [finished[n] for n in numbers], [
        switched[next(s for s in switched if s.split("-")[0] == n)] for n in numbers
    ]


def execute(llm, run: dict) -> Results:
    llm.reset_prefix_cache()
    everyone, new = list(range(len(run["prompts"]))), run["new_tokens"]
    switched: list[int] = []
    if "update" in run:
        outputs, switched = update_in_flight(llm, run, 5)
    else:
        outputs = generate(llm, run, everyone)
    sequences = [[*run["prompts"][n], *outputs[n].token_ids] for n in everyone]
    alone, alone_tokens = torch.full((len(everyone), new), torch.nan), torch.full((len(everyone), new), -1)
    for n in run["alone"]:
        (single,) = generate(llm, run, [n])
        alone[n], alone_tokens[n] = torch.tensor(log_probs(single)), torch.tensor(single.token_ids)
    scoring = [sampling(run, 0, max_tokens=1, logprobs=None, prompt_logprobs=0) for _ in everyone]
    prefill = []
    for sequence, output in zip(
        sequences, llm.generate([{"prompt_token_ids": s} for s in sequences], scoring, use_tqdm=False), strict=True
    ):
        prefill += [output.prompt_logprobs[i][sequence[i]].logprob for i in range(len(sequence) - new, len(sequence))]
    return Results(
        tokens=torch.tensor(functools.reduce(operator.iadd, sequences, []), dtype=torch.int32),
        lengths=torch.tensor([len(s) for s in sequences]),
        prompts=torch.tensor([len(p) for p in run["prompts"]]),
        together=torch.tensor(functools.reduce(operator.iadd, (log_probs(o) for o in outputs), [])),
        alone=alone.flatten(),
        alone_tokens=alone_tokens.flatten().int(),
        prefill=torch.tensor(prefill),
        switched=torch.tensor(switched, dtype=torch.int64),
    )


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    settings, llm = None, None
    for run in plan["runs"]:
        if run["engine"] != settings:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            settings, llm = run["engine"], build(**run["engine"])
        save_file(vars(execute(llm, run)), Path(plan["out"]) / f"{run['name']}.safetensors")
    if "controls" in plan:
        from tests.parity.controls import controls

        llm.llm_engine.engine_core.shutdown()
        (Path(plan["out"]) / "controls.json").write_text(json.dumps(controls(plan["controls"])))


if __name__ == "__main__":
    main()
