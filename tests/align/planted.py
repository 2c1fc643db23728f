"""The learner's side of a job, with a fault planted for each task that names one: what the checks have to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_rlzero.align import learner as side
from megatron_rlzero.align.job import Job, Task
from megatron_rlzero.architectures import nemotron_h, qwen3_moe
from megatron_rlzero.invariance import megatron, operators
from megatron_rlzero.invariance.operators import ALIGNED
from megatron_rlzero.learner.learner import Learner


def _operators(patch: pytest.MonkeyPatch, **changed: Callable) -> None:
    patch.setitem(operators.OPERATORS, "aligned", replace(ALIGNED, **changed))


def _settings(patch: pytest.MonkeyPatch, family, **changed: object) -> None:
    given = family.transformer_config
    patch.setattr(family, "transformer_config", lambda hf: given(hf) | changed)


def _after_loading(patch: pytest.MonkeyPatch, change: Callable[[Learner], None]) -> None:
    make = Learner.__init__

    def made(self, *arguments):
        make(self, *arguments)
        change(self)

    patch.setattr(Learner, "__init__", made)


def rotary_base(patch):
    given = qwen3_moe.rotary
    patch.setattr(qwen3_moe, "rotary", lambda hf: given(hf) | {"base": 20_000.0})


def norm_epsilon(patch):
    _settings(patch, qwen3_moe, layernorm_epsilon=1e-5)


def gate_in_bf16(patch):
    _operators(patch, gate=lambda x, weight, *rest: ALIGNED.gate(x.bfloat16(), weight.bfloat16(), *rest).float())


def ties_to_the_highest(patch):
    def top_k(logits, k, renormalise, scaling=1.0, sigmoid=False, bias=None, groups=1, group_top_k=1):
        bias = None if bias is None else bias.flip(-1)
        p, experts = ALIGNED.top_k(logits.flip(-1), k, renormalise, scaling, sigmoid, bias, groups, group_top_k)
        return p.flip(-1), logits.shape[-1] - 1 - experts.flip(-1)

    _operators(patch, top_k=top_k)


def residual_rounded(patch):
    given = megatron.get_bias_dropout_add

    def add(*arguments):
        inner = given(*arguments)
        return lambda *values: inner(*values).bfloat16().to(values[1].dtype)

    patch.setattr(megatron, "get_bias_dropout_add", add)


def experts_transposed(patch):
    def change(learner: Learner) -> None:
        for name, parameter in learner.weights.local.items():
            if ".experts.linear_fc2." in name:
                parameter.data = parameter.data.T.reshape(parameter.shape).contiguous()

    _after_loading(patch, change)


def routed_scaling(patch):
    _settings(patch, nemotron_h, moe_router_topk_scaling_factor=1.0)


def gate_after_the_norm(patch):
    def norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        even = torch.full_like(gate, 1e4)  # whose silu is a constant, which the norm takes out
        return (ALIGNED.gated_group_norm(x, even, weight, groups, eps * 1e8) * torch.nn.functional.silu(gate)).to(
            x.dtype
        )

    _operators(patch, gated_group_norm=norm)


def no_bound_of_the_time_step(patch):
    given = nemotron_h.mixer
    patch.setattr(nemotron_h, "mixer", lambda hf: given(hf) | {"dt_limit": (0.0, float("inf"))})


def stock_norm(patch):
    _operators(patch, rms_norm=operators.STOCK.rms_norm)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def backward_halved(patch):
    _operators(patch, attention=lambda q, *rest: ALIGNED.attention(_Halved.apply(q), *rest))


def decay_of_norms(patch):
    def change(learner: Learner) -> None:
        for group in learner.parts.optimizer.param_groups:
            group["wd_mult"] = 1.0

    _after_loading(patch, change)


def execute(job: Job, task: Task, device: torch.device) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if task.get("fault"):
            globals()[task["fault"]](patch)
        side.execute(job, task, device)


if __name__ == "__main__":
    side.main(execute)
