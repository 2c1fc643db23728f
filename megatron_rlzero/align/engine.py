"""The engine's side of a job: vLLM in this process samples, scores, is watched and traced.

Usage, by ``job.run_engine``: python -m megatron_rlzero.align.engine PLAN.json. Tasks that need the same engine follow
each other. Kinds: ``map`` watches what computes, ``trace`` keeps operators' outputs, ``sample`` samples in several
ways, ``time`` times operators.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rlzero.align.job import Job, Task
from megatron_rlzero.align.map import SAMPLER
from megatron_rlzero.align.watch import Clock, Watch, look_into_libraries
from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.config import Config
from megatron_rlzero.generation.requests import ARGUMENT
from megatron_rlzero.invariance.trace import Recorder
from megatron_rlzero.invariance.vllm import Settings


def build(config: Config, length: int, chunk: int = 2048, prefix_caching: bool = False, **flags: Any):
    """An LLM as a run's server has it, in this process; ``chunk`` is its budget of tokens in one step."""
    from vllm import LLM
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.attention import selector

    from megatron_rlzero.generation.server import DTYPES, cpu_build, has_experts

    # One engine after the other in a process: what vLLM remembers may hold layers of the one before.
    rotary_embedding._ROPE_DICT.clear()
    selector._cached_get_attn_backend.cache_clear()
    tp = config.rollout.tensor_model_parallel_size
    aligned = config.kernels == "aligned"
    memory = {"kv_cache_memory_bytes": 2**27} if cpu_build() else {}
    return LLM(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        tensor_parallel_size=tp,
        enable_expert_parallel=tp > 1 and aligned and has_experts(read_config(config.model.path)),
        max_model_len=length,
        max_num_seqs=64,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=prefix_caching,
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logits_processors=["megatron_rlzero.generation.logits_processor:SeededSampling"],
        disable_log_stats=True,
        **memory,
        **flags,
    )


def sampling(new: int, n: int, **settings: Any):
    """Greedy, for request ``n``."""
    from vllm import SamplingParams

    key = {"key": [1, 0, n, 0], "temperature": Settings.from_environment().temperature}
    return SamplingParams(
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        extra_args={ARGUMENT: key},
        **({"max_tokens": new, "logprobs": 0} | settings),
    )


def generate(llm, prompts: Sequence[Sequence[int]], which: Sequence[int], new: int) -> list:
    requests = [{"prompt_token_ids": list(prompts[n])} for n in which]
    outputs = llm.generate(requests, [sampling(new, n) for n in which], use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def log_probs(output) -> list[float]:
    return [at[token].logprob for at, token in zip(output.logprobs, output.token_ids, strict=True)]


def sample(llm, task: Task) -> dict[str, torch.Tensor]:
    """Responses to ``prompts``, of ``new`` tokens each, and their log-probs in three ways.

    Returns:
        tokens: int32 [prompts, new]; together: fp32, alike, all requests at once; prefill: fp32, alike, as prompt
        log-probs of one prefill; alone: fp32, alike, one request after the other, NaN for those not in ``alone``;
        seconds: float64, of sampling all at once.
    """
    prompts, new = task["prompts"], task["new"]
    everyone = range(len(prompts))
    begun = time.perf_counter()
    outputs = generate(llm, prompts, everyone, new)
    seconds = time.perf_counter() - begun
    alone = torch.full((len(prompts), new), torch.nan)
    for n in task["alone"]:
        alone[n] = torch.tensor(log_probs(*generate(llm, prompts, [n], new)))
    whole = [[*prompts[n], *outputs[n].token_ids] for n in everyone]
    scoring = [sampling(1, n, logprobs=None, prompt_logprobs=0) for n in everyone]
    prefill = [
        [output.prompt_logprobs[i][tokens[i]].logprob for i in range(len(tokens) - new, len(tokens))]
        for tokens, output in zip(
            whole, llm.generate([{"prompt_token_ids": s} for s in whole], scoring, use_tqdm=False), strict=True
        )
    ]
    return {
        "tokens": torch.tensor([list(o.token_ids) for o in outputs], dtype=torch.int32),
        "together": torch.tensor([log_probs(o) for o in outputs]),
        "prefill": torch.tensor(prefill),
        "alone": alone,
        "seconds": torch.tensor(seconds, dtype=torch.float64),
    }


def trace(llm, hf: dict[str, Any], task: Task) -> dict[str, torch.Tensor]:
    """Operator -> its output for the prompts, one after the other in one prefill each."""
    recorder, points = Recorder(), architecture(hf).trace_points(hf)
    llm.apply_model(
        lambda model: [recorder.watch(p.name, model.get_submodule(p.engine), p.from_engine) for p in points]
    )
    for n, prompt in enumerate(task["prompts"]):
        recorder.length = len(prompt)
        llm.generate({"prompt_token_ids": prompt}, sampling(1, n, logprobs=None), use_tqdm=False)
    recorder.close()
    return recorder.joined()


def watched(llm, task: Task, watch: type[Watch] | type[Clock]) -> dict[str, Any]:
    """What a ``Watch`` or a ``Clock`` saw while the prompts were answered; of the sampler too."""
    watches: list[Watch] = []
    llm.apply_model(lambda model: watches.append(watch(model)))
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    watches.append(watch(runner.sampler, SAMPLER))
    generate(llm, task["prompts"], range(len(task["prompts"])), task["new"])
    for each in watches:
        each.close()
    return {name: seen for each in watches for name, seen in each.found().items()}


def main() -> None:
    job = Job.read(sys.argv[1])
    if any(task["kind"] == "map" for task in job.tasks):
        look_into_libraries()
    engine, llm = None, None
    for task in job.tasks:
        config = job.configured(task)
        wanted = (
            config.model.path,
            config.model.dtype,
            task["length"],
            task.get("chunk", 2048),
            task.get("cached", False),
        )
        if wanted != engine:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            engine, llm = wanted, build(config, *wanted[2:])
        llm.reset_prefix_cache()
        hf, out = read_config(config.model.path), job.out / f"engine-{task['name']}"
        match task["kind"]:
            case "sample":
                save_file(sample(llm, task), f"{out}.safetensors")
            case "trace":
                save_file(trace(llm, hf, task), f"{out}.safetensors")
            case "map":
                Path(f"{out}.json").write_text(json.dumps(watched(llm, task, Watch)))
            case "time":
                Path(f"{out}.json").write_text(json.dumps(watched(llm, task, Clock)))


if __name__ == "__main__":
    main()
