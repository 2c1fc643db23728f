"""Which boxes of a model every learner rank and every engine worker holds: pure functions of tables and sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_rlzero.architectures.rules import Rule
from megatron_rlzero.resharding.layout import Layout, Piece

if TYPE_CHECKING:
    from megatron_rlzero.architectures import Architecture


_TRAILING = re.compile(r"\d+$")


class Coordinates(NamedTuple):
    """A rank's place in Megatron's groups."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True)
class Parallel:
    """Sizes of a learner under Megatron's names; what they leave of ``world_size`` is data parallel.

    Raises:
        ValueError: sizes that do not divide the world, named.
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        experts = self.expert_model_parallel_size * self.expert_tensor_parallel_size
        if self.world_size % (tensor * pipeline):
            raise ValueError(
                f"world_size = {self.world_size} is not a multiple of tensor x pipeline parallel size = "
                f"{tensor} x {pipeline}"
            )
        if self.stage_size % experts:
            raise ValueError(
                f"expert x expert-tensor parallel size = {self.expert_model_parallel_size} x "
                f"{self.expert_tensor_parallel_size} does not divide the {self.stage_size} ranks of a pipeline stage"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pipeline_model_parallel_size

    def coordinates(self, rank: int) -> Coordinates:
        """Megatron's default order of ranks: tensor (or expert tensor, then expert), data, and pipeline outermost."""
        stage, within = divmod(rank, self.stage_size)
        return Coordinates(
            within % self.tensor_model_parallel_size,
            stage,
            within // self.expert_tensor_parallel_size % self.expert_model_parallel_size,
            within % self.expert_tensor_parallel_size,
        )


def learner_layout(family: Architecture, hf: dict[str, Any], parallel: Parallel, slices: int) -> Layout:
    """What every learner rank holds; local names are those of ``family.parameters``, numbers of the whole model.

    Args:
        hf: config.json of the checkpoint.
        slices: ``reduction_slices`` of the configuration, which pads the vocabulary.

    Raises:
        ValueError: a size that does not divide heads, widths, vocabulary or experts, or more stages than layers.
    """
    rules = family.parameters(hf, slices)
    stages = parallel.pipeline_model_parallel_size
    stage_of_layer = [s for s, part in enumerate(family.layer_pattern(hf, stages).split("|")) for _ in range(len(part))]
    experts = count_experts(rules)
    if experts % parallel.expert_model_parallel_size:
        raise ValueError(
            f"expert_model_parallel_size = {parallel.expert_model_parallel_size} does not divide the {experts} experts"
        )
    # Ranks that hold the same shard hold the same pieces.
    dense: dict[tuple[int, int], list[int]] = {}
    sparse: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(parallel.world_size):
        at = parallel.coordinates(rank)
        dense.setdefault((at.pipeline, at.tensor), []).append(rank)
        sparse.setdefault((at.pipeline, at.expert, at.expert_tensor), []).append(rank)
    layout: Layout = {rank: [] for rank in range(parallel.world_size)}
    tied = hf.get("tie_word_embeddings", False)
    for name, rule in rules.items():
        expert = expert_number(name)
        size = parallel.tensor_model_parallel_size if expert is None else parallel.expert_tensor_parallel_size
        if name == "output_layer.weight" and tied and stages == 1:
            continue  # the embedding itself
        stage = stage_of(name, stage_of_layer)
        for shard in range(size):
            pieces = list(rule.pieces(name, shard, size))
            if expert is None:
                holders = dense[stage, shard]
            else:
                group = expert * parallel.expert_model_parallel_size // experts
                holders = sparse[stage, group, shard]
            for rank in holders:
                layout[rank].extend(pieces)
    return layout


def engine_layout(family: Architecture, hf: dict[str, Any], tensor_parallel_size: int) -> Layout:
    """What every worker of a vLLM server holds; local names are those of ``family.engine_parameters``.

    Experts are whole, and spread over the workers as vLLM's linear placement does: the first workers take what is left
    over (vllm/model_executor/layers/fused_moe/expert_map_manager.py).

    Raises:
        ValueError: a size that does not divide heads, widths or vocabulary.
    """
    rules = family.engine_parameters(hf)
    each, left = divmod(count_experts(rules), tensor_parallel_size)
    owner = [worker for worker in range(tensor_parallel_size) for _ in range(each + (worker < left))]
    layout: Layout = {worker: [] for worker in range(tensor_parallel_size)}
    tied = hf.get("tie_word_embeddings", False)
    for name, rule in rules.items():
        expert = expert_number(name)
        if name == "lm_head.weight" and tied:
            continue  # the embedding itself
        if expert is not None:
            layout[owner[expert]].extend(rule.pieces(name, 0, 1))
            continue
        for worker in layout:
            layout[worker].extend(rule.pieces(name, worker, tensor_parallel_size))
    return layout


def expert_number(name: str) -> int | None:
    """The number in the whole model that ends the name of a routed expert's parameter; None for other parameters."""
    return int(_TRAILING.search(name)[0]) if ".experts." in name else None


def count_experts(rules: Iterable[str]) -> int:
    """Routed experts among parameters."""
    return 1 + max((n for n in map(expert_number, rules) if n is not None), default=-1)


def stage_of(name: str, stage_of_layer: Sequence[int]) -> int:
    """The pipeline stage of a parameter, named with numbers of the whole model."""
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        if int(match[1]) >= len(stage_of_layer):
            raise ValueError(
                f"{name}: the pattern of the family has {len(stage_of_layer)} layers, fewer than its table"
            )
        return stage_of_layer[int(match[1])]
    return 0 if name.startswith("embedding.") else stage_of_layer[-1]


def finest(rules: dict[str, Rule], slices: int) -> list[Piece]:
    """The whole model in the smallest boxes to which any tensor-parallel size up to ``slices`` cuts it."""
    return [piece for name, rule in rules.items() for piece in _finest(name, rule, slices)]


def _finest(name: str, rule: Rule, slices: int) -> list[Piece]:
    size = 1 if expert_number(name) is not None else slices
    while True:
        try:
            return [piece for rank in range(size) for piece in rule.pieces(name, rank, size)]
        except ValueError:  # no tensor-parallel size above the number of KV heads, for one
            size //= 2
