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

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.layouts import engine_layout
from megatron_rlzero.generation.requests import ARGUMENT
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
    from vllm import SamplingParams

    key = {"key": [1, 0, n, 0], "temperature": Settings.from_environment().temperature}
    return SamplingParams(
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        extra_args={ARGUMENT: key},
        **({"max_tokens": run["new_tokens"], "logprobs": 0} | settings),
    )


def build(model: str, dtype: str, tp: int = 1, chunk: int = 2048, prefix_caching: bool = False, length: int = 256):
    from vllm import LLM
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.attention import selector

    # One engine after the other in a process: what vLLM remembers may hold layers of the one before.
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()
    settings = Settings.from_environment()
    hf = read_config(model)
    return LLM(
        model,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
        tensor_parallel_size=tp,
        enable_expert_parallel=tp > 1 and settings.kernels == "aligned" and hf["model_type"] == "qwen3_moe",
        max_model_len=length,
        max_num_seqs=64,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=prefix_caching,
        kv_cache_memory_bytes=2**27,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logits_processors=["megatron_rlzero.generation.logits_processor:SeededSampling"],
        weight_transfer_config={"backend": BACKEND},
        disable_log_stats=True,
    )


def generate(llm, run: dict, which: list[int]) -> list:
    prompts = [{"prompt_token_ids": run["prompts"][n]} for n in which]
    outputs = llm.generate(prompts, [sampling(run, n) for n in which], use_tqdm=False)
    return [output.outputs[0] for output in outputs]


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
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    for n, prompt in enumerate(run["prompts"]):
        engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling(run, n))
    for _ in range(steps):
        engine.step()
    switched = {request.request_id: len(request.output_token_ids) for request in core.scheduler.requests.values()}
    core.pause_scheduler("keep", True)
    transfer = core.model_executor.driver_worker.worker.weight_transfer_engine
    stage(transfer, Path(run["update"]))
    transfer.finish_weight_update()
    core.resume_scheduler()
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    numbers = sorted(finished, key=int)
    return [finished[n] for n in numbers], [
        switched[next(s for s in switched if s.split("-")[0] == n)] for n in numbers
    ]


def log_probs(output) -> list[float]:
    return [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]


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
    engine, llm = None, None
    for run in plan["runs"]:
        if run["engine"] != engine:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            engine, llm = run["engine"], build(**run["engine"])
        save_file(vars(execute(llm, run)), Path(plan["out"]) / f"{run['name']}.safetensors")
    if "controls" in plan:
        from tests.parity.controls import controls

        llm.llm_engine.engine_core.shutdown()
        (Path(plan["out"]) / "controls.json").write_text(json.dumps(controls(plan["controls"])))


if __name__ == "__main__":
    main()
