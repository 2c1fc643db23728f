"""One rank's learner: takes a training step on a batch, scores a batch, and says which weights it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.config import Config
from megatron_rlzero.kernels import tiles
from megatron_rlzero.learner import cpu
from megatron_rlzero.learner.batch import Batch, Microbatch
from megatron_rlzero.learner.build import DTYPES, build
from megatron_rlzero.learner.checkpoint import TrainingState
from megatron_rlzero.learner.clip import GradientNorm
from megatron_rlzero.learner.pack import pack
from megatron_rlzero.learner.weights import Weights
from megatron_rlzero.objectives import OBJECTIVES, Objective, reinforce_zero


@dataclass
class Gradients:
    """What a backward pass over a batch gave beside the gradients; the same on every rank.

    Attributes:
        loss: the objective's value.
        log_pi, entropy: fp32 [n], aligned with Batch.tokens: of each token under the present weights; 0 for the first
            token of a response, which nothing predicts.
    """

    loss: float
    microbatches: int
    log_pi: Tensor
    entropy: Tensor


@dataclass
class Step:
    """What an update gave; the same on every rank.

    Attributes:
        grad_norm: before clipping.
        stepped: False where no action token counted; then the optimizer did nothing and the norm is 0.
    """

    gradients: Gradients
    grad_norm: float
    clipped: bool
    stepped: bool
    learning_rate: float


class Learner:
    """The policy on this rank; every method is collective over the learner's ranks.

    Attributes:
        weights: layout of the parameters and their exchange with Hugging Face names.
        state: what a checkpoint keeps of model, optimizer and schedule.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.hf = read_config(config.model.path)
        family = architecture(self.hf)
        self.parts = build(config, family, self.hf, device)
        self.weights = Weights(self.parts.policy, family, self.hf, DTYPES[config.model.dtype], config.reduction_slices)
        self.weights.load(config.model.path)
        self._norm = GradientNorm(self.weights.trained, self.weights.finest, dist.get_rank())
        replicas = parallel_state.get_data_parallel_world_size()
        if self.parts.config.num_moe_experts:
            replicas = max(replicas, parallel_state.get_expert_data_parallel_world_size())
        self._sharded_gradients = config.learner.optimizer.use_distributed_optimizer and replicas > 1
        # The optimizer copied its main parameters before the weights were there.
        self.parts.optimizer.reload_model_params()
        self.state = TrainingState(self.parts, self.weights)

    def backward(self, batch: Batch, likelihood: bool = False) -> Gradients:
        """Gradients of ``loop.objective`` over the whole batch, left in the parameters' ``main_grad``.

        Args:
            batch: the same on every rank.
            likelihood: put the learner's own probability in the place of mu. With all advantages 1 that is the gradient
                of maximum likelihood, with the same weights 1/B and 1/T_i.

        Raises:
            FloatingPointError: a ratio or the loss is not finite; names the response.
        """
        self.parts.model.zero_grad_buffer()
        self.parts.optimizer.zero_grad()
        out = self._run(
            batch, partial(_objective, OBJECTIVES[self.config.loop.objective], likelihood), forward_only=False
        )
        actions = batch.action_mask
        ratio = torch.ones(()) if likelihood else (out.log_pi[actions] - batch.log_mu[actions]).exp()
        loss = float(out.loss) / len(batch.lengths)
        if not (math.isfinite(loss) and bool(ratio.isfinite().all())):
            raise FloatingPointError(f"loss = {loss}; {_largest_ratio(batch, out.log_pi)}")
        return Gradients(loss, out.microbatches, out.log_pi, out.entropy)

    def step(self, batch: Batch, likelihood: bool = False) -> Step:
        """``backward``, then one step of the optimizer and of the learning-rate schedule.

        Raises:
            FloatingPointError: ratio, loss or gradient is not finite; names the response with the largest ratio. The
                weights and the optimizer are as before.
        """
        gradients = self.backward(batch, likelihood)
        optimizer = self.parts.optimizer
        if not bool(batch.action_mask.any()):
            return Step(gradients, 0.0, False, False, 0.0)
        with cpu.device_mode():
            grad_norm = self._grad_norm()
            if not math.isfinite(grad_norm):
                raise FloatingPointError(f"gradient norm = {grad_norm}; {_largest_ratio(batch, gradients.log_pi)}")
            limit = self.config.learner.optimizer.clip_grad
            clipped = 0 < limit < grad_norm
            if clipped:
                self.parts.model.scale_gradients(limit / grad_norm)
            self.parts.scheduler.step(increment=1)
            optimizer.step()
        learning_rate = max(group["lr"] for group in optimizer.param_groups)
        return Step(gradients, grad_norm, clipped, True, learning_rate)

    def _grad_norm(self) -> float:
        if self._sharded_gradients:  # after the reduce-scatter no rank has a whole gradient
            self.parts.optimizer.prepare_grads()
            return float(self.parts.optimizer.get_grad_norm())
        return self._norm(self.weights.gradients())

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, fp32 [n] each, of every token of ``batch`` under the current weights."""
        out = self._run(batch, _no_objective, forward_only=True)
        return out.log_pi, out.entropy

    def _run(self, batch: Batch, objective, forward_only: bool) -> _Output:
        config, parts = self.config.learner, self.parts
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        plan = pack(batch.lengths.tolist(), ranks, config.max_tokens_per_microbatch)[rank]
        microbatches = [
            Microbatch.of(batch, responses, tiles.ROWS * self.config.reduction_slices, parts.device)
            for responses in plan
        ]
        n = len(batch.tokens)
        # Log-probability and entropy of each token, and the loss: one rank fills each element, the rest is zero.
        collected = torch.zeros(2, n + 1, dtype=torch.float64)
        loss_sum = torch.zeros(1, dtype=torch.float64)

        def forward_step(iterator: Iterator[Microbatch], model):
            microbatch = next(iterator)
            output = model(microbatch.tokens, microbatch.targets, microbatch.packed, microbatch.padding_mask)
            return output, partial(loss, microbatch)

        def loss(microbatch: Microbatch, output: Tensor):
            value = objective(microbatch, output[0, :, 0])
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                real = microbatch.where >= 0
                # Position j predicts the token after it; a response's last position predicts nothing.
                place = (microbatch.where[real] + 1).cpu()
                collected[:, place] = output[0, real].detach().T.to("cpu", torch.float64)
                loss_sum[0] += value.detach().to("cpu", torch.float64)
            responses = torch.tensor(len(microbatch.responses), dtype=torch.int, device=output.device)
            return value, responses, {}

        # The router's own losses come times the tokens of a microbatch, and all gradients are divided by the responses:
        # so that its coefficients are those of means over all tokens.
        parts.config.moe_grad_scale_func = lambda: torch.tensor(len(batch.lengths) / max(n, 1))
        parts.model.train(not forward_only)
        with cpu.device_mode(), torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(microbatches),
                model=[parts.model],
                num_microbatches=len(microbatches),
                seq_length=config.max_tokens_per_microbatch,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        dist.all_reduce(collected)
        dist.all_reduce(loss_sum)
        collected[:, batch.starts] = 0.0
        log_pi, entropy = collected[:, :n].float()
        return _Output(loss_sum[0], log_pi, entropy, len(microbatches))


@dataclass
class _Output:
    loss: Tensor
    log_pi: Tensor
    entropy: Tensor
    microbatches: int


def _objective(objective: Objective, likelihood: bool, microbatch: Microbatch, log_pi: Tensor) -> Tensor:
    if likelihood:
        objective, log_mu = reinforce_zero, log_pi.detach()
    else:
        log_mu = microbatch.log_mu
    return objective(log_pi, log_mu, microbatch.advantage, microbatch.weight, microbatch.owner)


def _no_objective(microbatch: Microbatch, log_pi: Tensor) -> Tensor:
    return log_pi.sum() * 0.0


def _largest_ratio(batch: Batch, log_pi: Tensor) -> str:
    """Names the response whose log-ratio is farthest from 0, NaN first, with its values."""
    distance = torch.where(batch.action_mask, (log_pi - batch.log_mu).abs(), 0.0).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    token = int(distance.argmax())
    response = int(torch.searchsorted(batch.lengths.cumsum(0), token, right=True))
    return (
        f"response {response} of the batch has log pi = {float(log_pi[token]):.6g}, "
        f"log mu = {float(batch.log_mu[token]):.6g} at token {token - int(batch.starts[response])}; nothing was stepped"
    )
