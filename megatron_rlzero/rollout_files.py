"""Rollouts in one safetensors file: arrays of all tokens end to end, and a line of JSON for each response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megatron_rlzero.rollout import Rollout

ARRAYS = {"tokens": np.int32, "action_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
VALUES = ("update", "item", "sample", "reward", "finish_reason", "attempts", "info")


def write_rollouts(path: str | Path, rollouts: Sequence[Rollout]) -> None:
    """Writes the file beside its place and moves it there; one that was there is replaced."""
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(r, name) for r in rollouts)]).astype(dtype)
        for name, dtype in ARRAYS.items()
    }
    arrays["lengths"] = np.array([len(r.tokens) for r in rollouts], np.int64)
    values = json.dumps([{name: getattr(r, name) for name in VALUES} for r in rollouts])
    partial = Path(f"{path}.partial")
    save_file(arrays, partial, metadata={"rollouts": values})
    partial.replace(path)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts in their order.

    Raises:
        ValueError: the file is damaged, or was not made by ``write_rollouts``.
    """
    try:
        with safe_open(path, "np") as file:
            values = json.loads((file.metadata() or {})["rollouts"])
            arrays = {name: file.get_tensor(name) for name in (*ARRAYS, "lengths")}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} holds no rollouts: {error}") from None
    cuts = np.cumsum(arrays.pop("lengths"))[:-1]
    parts = {name: np.split(array, cuts) for name, array in arrays.items()}
    return [Rollout(**value, **{name: parts[name][i] for name in ARRAYS}) for i, value in enumerate(values)]
