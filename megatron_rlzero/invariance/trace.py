"""Layer by layer: what every operator gives on both sides for the same tokens, and the first that differs.

``python -m megatron_rlzero.invariance.trace learner|engine DIRECTORY`` runs one side, alone in its process, on the job
that ``compare_layers`` left in DIRECTORY, and writes the operators' outputs there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.config import Config


@dataclass(frozen=True)
class Difference:
    """Outcome over all operators.

    Attributes:
        tokens: tokens that ran through both sides.
        operators: how many outputs were compared.
        differing: names of those with a differing byte, in the order of the forward pass.
        router_choices: token-layers whose set of experts differs, of ``routed``.
    """

    tokens: int
    operators: int
    differing: list[str]
    router_choices: int
    routed: int

    @property
    def first(self) -> str:
        """The first operator whose output differs; empty where none does."""
        return self.differing[0] if self.differing else ""


def compare_layers(config: Config, documents: Sequence[Sequence[int]], directory: Path) -> Difference:
    """Runs ``documents`` (token ids) through one learner rank and one engine worker on the weights of model.path.

    Raises:
        RuntimeError: one side failed; with the end of what it said.
    """
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), directory / "config.yaml")
    (directory / "documents.json").write_text(json.dumps([[int(t) for t in d] for d in documents]))
    for side in ("learner", "engine"):
        run = subprocess.run(
            [sys.executable, "-m", __name__, side, str(directory)],
            env=_environment(config, side),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"the trace of the {side} failed:\n{run.stdout[-3000:]}")
    learner, engine = (load_file(directory / f"{side}.safetensors") for side in ("learner", "engine"))
    names = json.loads((directory / "operators.json").read_text())
    differing = [n for n in names if not torch.equal(learner[n].view(torch.uint8), engine[n].view(torch.uint8))]
    choices = [n for n in names if n.endswith("router choice")]
    moved = sum(int((learner[n] != engine[n]).any(-1).sum()) for n in choices)
    tokens = sum(len(d) for d in documents)
    return Difference(tokens, len(names), differing, moved, tokens * len(choices))


def _environment(config: Config, side: str) -> dict[str, str]:
    from megatron_rlzero.generation import server

    if side == "engine":
        return server.environment(config) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    return server.base_environment() | one_rank | {"MASTER_PORT": str(server.free_port()), "PYTHONWARNINGS": "ignore"}


class Recorder:
    """Keeps the outputs of modules as [tokens, elements] under the operators' names, document after document.

    Attributes:
        length: tokens of the document that runs; what comes after them is padding.
    """

    def __init__(self) -> None:
        self.length = 0
        self._outputs: dict[str, list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []

    def watch(self, name: str, module: nn.Module, select: Callable[[Any], Tensor]) -> None:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            rows = select(output)[: self.length].reshape(self.length, -1)
            self._outputs.setdefault(name, []).append(rows.detach().clone())

        self._handles.append(module.register_forward_hook(keep))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def joined(self) -> dict[str, Tensor]:
        """Operator -> its outputs, one document after the other."""
        return {name: torch.cat(parts).contiguous() for name, parts in self._outputs.items()}


def _learner(config: Config, documents: list[list[int]], directory: Path) -> None:
    import numpy as np

    from megatron_rlzero.learner.batch import Batch
    from megatron_rlzero.learner.build import initialise_distributed
    from megatron_rlzero.learner.learner import Learner
    from megatron_rlzero.rollout import Rollout

    layout = config.learner
    layout.world_size = layout.tensor_model_parallel_size = layout.pipeline_model_parallel_size = 1
    layout.expert_model_parallel_size = 1
    device, _ = initialise_distributed(config)
    learner = Learner(config, device)
    recorder, points = Recorder(), architecture(learner.hf).trace_points(learner.hf)
    for point in points:
        recorder.watch(point.name, learner.parts.policy.get_submodule(point.learner), point.from_learner)
    for tokens in documents:
        recorder.length = length = len(tokens)
        none = np.zeros(length, np.float32)
        rollout = Rollout(0, 0, 0, np.array(tokens, np.int32), none > 0, none, none.astype(np.int32), 0.0, "stop")
        learner.score(Batch.of([rollout]))
    save_file(recorder.joined(), directory / "learner.safetensors")
    (directory / "operators.json").write_text(json.dumps([point.name for point in points]))


def _engine(config: Config, documents: list[list[int]], directory: Path) -> None:
    from vllm import LLM, SamplingParams

    from megatron_rlzero.generation.server import DTYPES

    hf = read_config(config.model.path)
    llm = LLM(
        config.model.path,
        dtype=DTYPES[config.model.dtype],
        enforce_eager=True,
        kv_cache_memory_bytes=config.rollout.cpu_kv_cache_gib * 2**30,
        max_model_len=max(map(len, documents)) + 1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    recorder = Recorder()

    def install(model: nn.Module) -> None:
        for point in architecture(hf).trace_points(hf):
            recorder.watch(point.name, model.get_submodule(point.engine), point.from_engine)

    llm.apply_model(install)
    for tokens in documents:
        recorder.length = len(tokens)
        llm.generate({"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    save_file(recorder.joined(), directory / "engine.safetensors")


def main() -> None:
    side, directory = sys.argv[1], Path(sys.argv[2])
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(directory / "config.yaml"))
    config = OmegaConf.to_object(merged)
    {"learner": _learner, "engine": _engine}[side](
        config, json.loads((directory / "documents.json").read_text()), directory
    )


if __name__ == "__main__":
    main()
