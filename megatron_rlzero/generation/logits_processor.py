"""Makes a vLLM server draw with our noise: its argmax becomes the token that generation/sampling.py draws.

Requests ask for temperature 0 and carry ``extra_args = {ARGUMENT: {"key": [...] | None, "temperature": T}}``.
The log-probs that the server reports are computed before this processor and stay the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

from megatron_rlzero.generation.requests import ARGUMENT
from megatron_rlzero.generation.sampling import sample, stream
from megatron_rlzero.invariance.vllm import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SeededSampling(LogitsProcessor):
    """State: batch row -> (stream of its key, its live list of response tokens); greedy rows have none."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        settings = Settings.from_environment()
        if settings is None:
            raise RuntimeError("this logits processor needs the settings that our launcher puts in the environment")
        self.temperature = settings.temperature
        self.rows: dict[int, tuple[int, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses requests that would be sampled in another way than their sender believes (HTTP 400)."""
        settings = Settings.from_environment()
        ours = (sampling_params.extra_args or {}).get(ARGUMENT)
        if settings is None or ours is None:
            raise ValueError(f"extra_args lacks {ARGUMENT}: this server draws by the key that a request brings")
        if ours.get("temperature") != settings.temperature:
            raise ValueError(
                f"temperature {ours.get('temperature')} differs from this server's {settings.temperature}; "
                "restart it with rollout.temperature of the run"
            )
        if sampling_params.temperature != 0.0:
            raise ValueError(f"SamplingParams.temperature = {sampling_params.temperature}; must be 0: see the key")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows vLLM's batch; removed, added, moved is the order it prescribes."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, response in batch_update.added:
            self._set(index, _row(params, response))
        for source, target, direction in batch_update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            self._set(target, moved)
            if direction == MoveDirectionality.SWAP:
                self._set(source, displaced)

    def _set(self, index: int, row: tuple[int, list[int]] | None) -> None:
        self.rows.pop(index, None)
        if row is not None:
            self.rows[index] = row

    def apply(self, logits: Tensor) -> Tensor:
        """Sets the drawn token's logit of every row with a key to infinity; logits float32 [rows, vocabulary]."""
        if not self.rows:
            return logits
        on_device: dict[str, Any] = {"dtype": torch.int64, "device": logits.device}
        indices = torch.tensor(list(self.rows), **on_device)
        streams = torch.tensor([state for state, _ in self.rows.values()], **on_device)
        positions = torch.tensor([len(response) for _, response in self.rows.values()], **on_device)
        logits[indices, sample(logits[indices], streams, positions, self.temperature)] = torch.inf
        return logits


def _row(params: SamplingParams, response: list[int]) -> tuple[int, list[int]] | None:
    ours = (params.extra_args or {}).get(ARGUMENT)
    return None if ours is None or ours["key"] is None else (stream(ours["key"]), response)
