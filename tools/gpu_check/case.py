"""One operator as it is checked: its call, the same in float64, and a call whose bits follow the size of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Operator:
    """Calls take ``inputs``.

    Attributes:
        oracle: takes the inputs in float64.
        per_row: the inputs of which each row belongs to the same row of the result; none if there are no rows.
        other: gives the values of ``call`` in another order, or with a fault; must not give its bits.
        bits: what is compared in bits, where that is more than ``call`` gives.
        torchs: name and call of torch's own operator, whose bits are looked at for comparison.
        roundings: to bf16, from a value to the next, for the tolerance.
        differentiable: whether there are gradients.
    """

    call: Call
    oracle: Call
    inputs: Sequence[Tensor]
    per_row: Sequence[int] = ()
    other: Call | None = None
    bits: Call | None = None
    torchs: tuple[str, Call] | None = None
    roundings: int = 1
    differentiable: bool = True


def split(call: Call) -> Call:
    """The sum over the last dimension of the first two inputs, in two parts that are rounded apart."""

    def cut(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        at = x.shape[-1] // 4
        return call(x[..., :at], weight[..., :at], *rest) + call(x[..., at:], weight[..., at:])

    return cut


def row_before(call: Call, per_row: Sequence[int]) -> Call:
    """Reads the inputs of the row before, as a wrong address would."""
    return lambda *inputs: call(*(x.roll(1, 0) if i in per_row else x for i, x in enumerate(inputs)))
