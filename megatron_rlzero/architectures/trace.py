"""Where one operator's output lies on both sides, for comparison layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rlzero.architectures.rules import Rule


def first(output: Any) -> Tensor:
    """The output, or the first of a tuple."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class TracePoint:
    """One operator.

    Attributes:
        name: in words, unique in the model.
        learner, engine: module names; what they return goes through ``from_learner``, ``from_engine`` and is then
            compared as [tokens, elements].
    """

    name: str
    learner: str
    engine: str
    from_learner: Callable[[Any], Tensor] = first
    from_engine: Callable[[Any], Tensor] = first


def in_order_of(rule: Rule, tensors: tuple[str, ...]) -> Callable[[Any], Tensor]:
    """Reorders the columns of a learner's projection, whose rows ``rule`` interleaves, tensor after tensor."""
    pieces = sorted(rule.pieces("", 0, 1), key=lambda p: (tensors.index(p.tensor), p.box.start))
    columns = [c for p in pieces for c in range(p.local_box.start[0], p.local_box.stop[0])]
    return lambda output: first(output).flatten(0, -2)[:, columns]


def chosen(top_k: int) -> Callable[[Any], Tensor]:
    """The set of experts as bool [tokens, E] from router logits."""

    def choose(logits: Any) -> Tensor:
        logits = first(logits)
        experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        return logits.new_zeros(logits.shape, dtype=bool).scatter(1, experts, True)

    return choose


def chosen_by_router(name: str, learner: str, engine: str) -> TracePoint:
    """The set of experts as bool [tokens, E]: the learner's router returns it, the engine's returns logits and ids."""
    return TracePoint(
        name,
        learner,
        engine,
        lambda output: output[1],
        lambda output: output[0].new_zeros(output[0].shape, dtype=bool).scatter(1, output[1], True),
    )
