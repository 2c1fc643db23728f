"""Environments: prompts and rewards, chosen by ``environment.kind``; this file maps the kind to its class."""

from __future__ import annotations

from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.environments.base import SPLITS, DataError, Environment

KINDS = ("reasoning_gym", "jsonl")


def build(config: EnvironmentConfig, split: str) -> Environment:
    """The environment that ``config.kind`` names.

    Args:
        config: the ``environment`` section.
        split: "train" or "eval"; the held-out items have indices of their own, from 0.

    Raises:
        DataError: the task or the data cannot be used; every problem is in it.
        ValueError: unknown kind or split.
    """
    if split not in SPLITS:
        raise ValueError(f"split = {split}: unknown; one of {', '.join(SPLITS)}")
    if config.kind == "reasoning_gym":
        from megatron_rlzero.environments.reasoning_gym import ReasoningGym

        return ReasoningGym(config, split)
    if config.kind == "jsonl":
        from megatron_rlzero.environments.jsonl import Jsonl

        return Jsonl(config, split)
    raise ValueError(f"environment.kind = {config.kind}: unknown; one of {', '.join(KINDS)}")


__all__ = ["KINDS", "SPLITS", "DataError", "Environment", "build"]
