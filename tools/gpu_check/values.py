"""Value and gradients of an operator against float64."""

from typing import Any

import torch
from torch import Tensor

from tools.gpu_check.case import Operator
from tools.gpu_check.measures import error, poisoned, tolerance, with_gradients


def check(operator: Operator, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Errors of the value, and of the gradients of all inputs that are numbers, in the order of the call."""
    with poisoned():
        found = _all(operator, operator.call, operator.inputs)
    wanted = _all(operator, operator.oracle, [x.double() if x.is_floating_point() else x for x in operator.inputs])
    limit, checks = tolerance(dtype, operator.roundings), []
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        what, measured = f"gradient {i}" if i else "value", error(a, b)
        checks.append({"what": what, "ok": measured <= limit, "error": measured, "tolerance": limit})
    return checks


def _all(operator: Operator, call: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return with_gradients(call, inputs) if operator.differentiable else (call(*inputs),)
