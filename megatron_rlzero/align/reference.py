"""The independent reference: transformers' model in float64, and Adam in float64.

transformers casts to float32 in norms, softmax and scans whatever the model's dtype; here it casts to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_rlzero.loss import reinforce_zero
from megatron_rlzero.rollout import Rollout

Tensors = dict[str, Tensor]


class Float64(TorchFunctionMode):
    """Code that asks for float32 gets float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        return function(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """int64 [n] -> [n - 1]: of each token but the first."""
    with Float64():
        return model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def gradients(model: nn.Module, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> tuple[float, Tensors]:
    """Value and gradients of the objective over all responses, the gradients under the checkpoint's names.

    Returns:
        (loss.py's L, tensor -> float64 gradient).
    """
    total = torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        action = torch.from_numpy(rollout.action_mask)[1:]
        if not action.any():
            continue
        log_pi = log_probs(model, torch.from_numpy(rollout.tokens).long())
        log_mu = torch.from_numpy(rollout.logprobs).double()[1:]
        weight = action.double() / action.sum()
        part, _ = reinforce_zero(log_pi, log_mu, torch.full_like(log_pi, float(advantage)), weight)
        (part / len(rollouts)).backward()
        total += part.detach() / len(rollouts)
    return float(total), named(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


def named(model: nn.Module, value: Callable[[nn.Parameter], Tensor]) -> Tensors:
    """``value`` of every parameter, as transformers would write it: renamed, and of stacked experts one by one."""
    kept = {name: p.data for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    values = {name: value(p) for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = values[name]
        with TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            return {n: t for file in Path(directory).glob("*.safetensors") for n, t in load_file(file).items()}
    finally:
        for name, p in parameters.items():
            p.data = kept[name]


@dataclass
class Adam:
    """Adam with decoupled weight decay (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), in float64.

    Attributes:
        decay: of tensors with two dimensions or more; others have none, as in Megatron.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    steps: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)

    def step(self, weights: Tensors, gradients: Tensors, rate: float) -> Tensors:
        """The weights after a step of ``rate``; those without a gradient are left out."""
        self.steps += 1
        after = {}
        for name, gradient in gradients.items():
            g, w = gradient.double(), weights[name].double()
            m = self.first[name] = self.beta1 * self.first.get(name, 0.0) + (1 - self.beta1) * g
            v = self.second[name] = self.beta2 * self.second.get(name, 0.0) + (1 - self.beta2) * g.square()
            m, v = m / (1 - self.beta1**self.steps), v / (1 - self.beta2**self.steps)
            decay = self.decay if g.dim() > 1 else 0.0
            after[name] = w - rate * (m / (v.sqrt() + self.eps) + decay * w)
        return after
