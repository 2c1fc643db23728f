"""The plugin that vLLM loads in each of its processes: weight transfer, parent watch, operators, temperature.

It does nothing in a process whose environment lacks ``VARIABLE``: only servers that this project launches set it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import asdict, dataclass

from megatron_rlzero.architectures import add
from megatron_rlzero.watch import end_with

#: the one environment variable of the plugin: vLLM's processes share their environment and nothing else with us
VARIABLE = "MEGATRON_RLZERO_SERVER"
#: what ``--weight-transfer-config`` calls our backend
BACKEND = "megatron_rlzero"


@dataclass(frozen=True)
class Settings:
    """What the launcher tells the plugin.

    Attributes:
        temperature: divides the logits, for the draw and for the log-probs alike.
        kernels: aligned | stock, see Config.
        reduction_slices: see Config; the same number as on the learner.
        operators: native | torch | sm_N, see kernels/backend.py; the same as on the learner.
        token_file: see RolloutConfig.
        family: see ModelConfig; an absolute path.
    """

    temperature: float
    kernels: str
    reduction_slices: int
    operators: str
    token_file: str = ""
    family: str = ""

    def to_environment(self) -> dict[str, str]:
        """The variable to add to a server's environment."""
        return {VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def from_environment() -> Settings | None:
        """This process's settings; None outside our servers."""
        text = os.environ.get(VARIABLE)
        return None if text is None else Settings(**json.loads(text))


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it once in every process."""
    settings = Settings.from_environment()
    if settings is None:
        return
    parent = multiprocessing.parent_process()
    if parent is not None:  # engine core and workers, also those of a server that we did not launch
        end_with(parent.pid)
    if settings.family:
        add(settings.family)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "megatron_rlzero.generation.weight_transfer", "RefitTransferEngine"
    )
    if settings.kernels == "aligned":
        from megatron_rlzero.invariance import vllm_layers
        from megatron_rlzero.kernels import backend

        backend.choose(settings.operators)
        vllm_layers.install(settings.reduction_slices, settings.temperature)
    elif settings.temperature != 1.0:
        _scale_logprobs(settings.temperature)


def _scale_logprobs(temperature: float) -> None:
    """Makes vLLM report log softmax(logits / temperature); the draw divides in generation/logits_processor.py."""
    from torch import Tensor
    from vllm.v1.sample.sampler import Sampler

    def compute_logprobs(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(dim=-1)

    Sampler.compute_logprobs = staticmethod(compute_logprobs)
