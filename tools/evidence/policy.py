"""A small autoregressive policy in many copies at once: a task that a program checks, its noise, its gradient, Adam.

The leading dimension of everything is the arm, one training run; arms never mix. The task: write the digits of the
prompt in ascending order, then the end token; the reward is 1 if the whole response is right, else 0. The policy sees
how often each digit occurs in the prompt and in the response so far, the position and the last token, through two
hidden layers. Its logits have a fixed root mean square, SCALE, so that every probability lies between 8e-4 and 0.961:
entropy and gradients do not vanish in a long run, but weights have shorter tails than those of a language model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_rlzero.advantage import ADVANTAGES
from megatron_rlzero.generation.sampling import gumbel, stream
from megatron_rlzero.objectives import OBJECTIVES

#: digits 0 to 6 and the end token; longest prompt; tokens of the longest response
VOCABULARY, LONGEST = 8, 15
DIGITS = END = VOCABULARY - 1
LIMIT = LONGEST + 1
FEATURES, HIDDEN = 24, 64
SCALE = 1.7
BETAS, EPS = (0.9, 0.95), 1e-8
#: updates over which the learning rate rises, as in the quick start
RISE = 10
#: of prompts, of the draw, of the logit noise
CONTENT, DRAW, LOGITS = 0, 1, 2

Params = dict[str, Tensor]


def initial(seeds: list[int]) -> Params:
    """fp32 [arms, in, out] of each layer; equal seeds give equal arms."""
    params: Params = {}
    for name, shape in (("w1", (FEATURES, HIDDEN)), ("w2", (HIDDEN, HIDDEN)), ("w3", (HIDDEN, VOCABULARY))):
        generators = [torch.Generator().manual_seed(1000 * seed + shape[0] + shape[1]) for seed in seeds]
        params[name] = torch.stack([torch.randn(*shape, generator=g) * (2 / shape[0]) ** 0.5 for g in generators])
    return params


def log_probs(params: Params, features: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """fp32 [arms, rows, VOCABULARY], of features [arms, rows, FEATURES]; ``noise`` is added to the logits.

    The layers compute in the dtype of ``params``. ``rows`` has to be a multiple of 16: a row then has the same bits in
    every batch, so that sampler and learner agree.
    """
    x = torch.bmm(features, params["w1"]).relu()
    x = torch.bmm(x, params["w2"]).relu()
    z = torch.bmm(x, params["w3"]).float()
    square = z * z
    for half in (4, 2, 1):
        square = square[..., :half] + square[..., half : 2 * half]
    logits = z * (SCALE / (square / VOCABULARY + 1e-6).sqrt())
    return torch.log_softmax(logits + noise, dim=-1)


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCABULARY)


def features(prompt: Tensor, written: Tensor, last: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
    """Of states: counts of the prompt's and the response's tokens [..., VOCABULARY], last token and position [...]."""
    prompt, written = prompt.clone(), written.clone()
    prompt[..., END], written[..., END] = 4, position  # a constant, and the position, in the end token's place
    return torch.cat([prompt, written, 4 * one_hot(last)], dim=-1).to(dtype) / 4


def states(prompt: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Features before each token of responses: prompt [arms, B, VOCABULARY], tokens [arms, B, T]; to [arms, B T, .]."""
    arms, batch, length = tokens.shape
    last = torch.cat([torch.full_like(tokens[..., :1], END), tokens[..., :-1]], dim=-1)
    written = one_hot(last)
    written[:, :, 0] = 0
    position = torch.arange(length).expand(arms, batch, length)
    whole = features(prompt[:, :, None].expand(*tokens.shape, -1), written.cumsum(2), last, position, dtype)
    return whole.reshape(arms, batch * length, FEATURES)


def noise(seeds: list[int], epoch: int, kind: int, prompts: Tensor, positions: int) -> Tensor:
    """Gumbel noise, float64 [seeds, prompts, positions, VOCABULARY], of the project's counter-based generator.

    A function of seed, epoch (0 training, -1 held out), kind, prompt and position alone: equal in all arms of a seed.
    """
    count = len(prompts)
    streams = torch.tensor([stream((seed, epoch, kind, 0)) for seed in seeds]).repeat_interleave(count * positions)
    counters = (prompts[:, None] * 64 + torch.arange(positions)).flatten().repeat(len(seeds))
    return gumbel(streams, counters, torch.arange(VOCABULARY)).view(len(seeds), count, positions, VOCABULARY)


def normal(gumbels: Tensor) -> Tensor:
    """Standard normal numbers from standard Gumbel ones, by both distribution functions."""
    return torch.special.ndtri((-(-gumbels).exp()).exp())


def contents(seeds: list[int], epoch: int, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Digits int64 [seeds, prompts, LONGEST] and a uniform number [seeds, prompts] that decides on the length."""
    draws = noise(seeds, epoch, CONTENT, prompts, LONGEST + 1)
    return draws[:, :, :LONGEST, :DIGITS].argmax(-1), (-(-draws[:, :, LONGEST, 0]).exp()).exp()


def make(digits: Tensor, uniform: Tensor, difficulty: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts of lengths 1 to ``difficulty`` [arms], evenly: counts [arms, B, VOCABULARY], answers [arms, B, LIMIT]."""
    lengths = 1 + (uniform * difficulty[:, None]).long()
    used = torch.where(torch.arange(LONGEST) < lengths[..., None], digits, END)
    answers = torch.cat([used.sort(-1).values, torch.full_like(used[..., :1], END)], dim=-1)
    return one_hot(used).sum(-2), answers


def reward(tokens: Tensor, answers: Tensor) -> Tensor:
    """1 where the response [..., LIMIT], END after its end, is the answer, else 0; fp32. A truncated one is wrong."""
    return (tokens == answers).all(-1).float()


class Learner:
    """Parameters, Adam's moments and one step of the project's objective, for all arms at once."""

    def __init__(
        self,
        params: Params,
        rate: Tensor,
        clip: Tensor,
        dtype: torch.dtype,
        objective: str = "reinforce_zero",
        samples: int = 1,
    ) -> None:
        """``samples`` responses in a row are of one prompt; ``grpo`` takes its own advantage, others batch_mean."""
        self.params, self.rate, self.clip, self.dtype = params, rate, clip, dtype
        self.objective, self.samples = OBJECTIVES[objective], samples
        self.estimator = ADVANTAGES["grpo" if objective == "grpo" else "batch_mean"]
        self.moments = {f"{m}.{name}": torch.zeros_like(p) for m in ("m", "v") for name, p in params.items()}
        self.steps = torch.zeros((), dtype=torch.int64)
        self.alive = torch.ones(len(rate), dtype=torch.bool)

    def cast(self) -> Params:
        """The parameters in the dtype of the forward pass: what a refit hands to the sampler."""
        return {name: p.to(self.dtype) for name, p in self.params.items()}

    def gradients(
        self, prompt: Tensor, tokens: Tensor, log_mu: Tensor, weight: Tensor, rewards: Tensor
    ) -> tuple[Params, dict[str, Tensor]]:
        """Gradient of the objective, over B, by each arm's parameters, and what the metrics need.

        prompt [arms, B, VOCABULARY]; tokens, log_mu, weight (1 / T_i at action tokens, else 0) [arms, B, T];
        rewards [arms, B]. The objective sums over arms too; since no arm depends on another's parameters, each gets
        the gradient of its own.
        """
        leaves = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        whole = log_probs({k: p.to(self.dtype) for k, p in leaves.items()}, states(prompt, tokens, self.dtype))
        log_pi = whole.gather(-1, tokens.reshape(len(tokens), -1, 1)).view(tokens.shape)
        advantage = self.advantages(rewards)[..., None].expand_as(tokens)
        response = torch.arange(rewards.numel()).repeat_interleave(tokens.shape[-1])
        flat = (x.flatten() for x in (log_pi, log_mu, advantage, weight))
        found = torch.autograd.grad(self.objective(*flat, response) / tokens.shape[1], list(leaves.values()))
        entropy = -(whole.detach().exp() * whole.detach()).sum(-1).view(tokens.shape)
        ratio = torch.where(weight > 0, log_pi.detach() - log_mu, 0.0).exp()
        loss = -(weight * advantage * ratio).sum((1, 2)) / tokens.shape[1]  # of reinforce_zero, whatever the objective
        return dict(zip(leaves, found, strict=True)), {"log_pi": log_pi.detach(), "loss": loss, "entropy": entropy}

    def advantages(self, rewards: Tensor) -> Tensor:
        """The project's estimates, fp32 [arms, B]."""
        groups = np.arange(rewards.shape[1]) // self.samples
        rows = [self.estimator(arm.astype(np.float64), groups) for arm in rewards.numpy()]
        return torch.from_numpy(np.stack(rows).astype(np.float32))

    def step(self, gradients: Params, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clips each arm's gradient by its whole norm and steps; (norm before clipping, norm of the change) [arms].

        An arm whose loss or norm is not finite is not stepped, now or later: the project stops such a run.
        """
        norm = sum(g.pow(2).sum((1, 2)) for g in gradients.values()).sqrt()
        self.alive &= norm.isfinite() & loss.isfinite()
        factor = (self.clip / norm).clamp(max=1.0)[:, None, None]
        self.steps += 1
        rate = self.rate[:, None, None] * min(1.0, int(self.steps) / RISE)
        alive = self.alive[:, None, None]
        corrections = [1 - beta ** int(self.steps) for beta in BETAS]
        changed = torch.zeros_like(norm)
        for name, p in self.params.items():
            g = torch.where(alive, gradients[name] * factor, 0.0)
            m, v = self.moments[f"m.{name}"], self.moments[f"v.{name}"]
            m.lerp_(g, 1 - BETAS[0])
            v.lerp_(g * g, 1 - BETAS[1])
            change = rate * (m / corrections[0]) / ((v / corrections[1]).sqrt() + EPS)
            change = torch.where(alive, change, 0.0)
            p -= change
            changed += change.pow(2).sum((1, 2))
        return norm, changed.sqrt()


def metrics(log_pi: Tensor, log_mu: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """k3, renyi3, ess and ratio_max of each arm by the formulas of diagnostics.py; [arms, B, T] to float64 [arms]."""
    d = torch.where(mask, log_pi.double() - log_mu.double(), 0.0)
    w, n = torch.where(mask, d.exp(), 0.0), mask.sum((1, 2))
    return {
        "k3": (torch.where(mask, d.expm1() - d, 0.0)).sum((1, 2)) / n,
        "renyi3": ((w**3).sum((1, 2)) / n).log() / 2,
        "ess": w.sum((1, 2)) ** 2 / (n * (w**2).sum((1, 2))),
        "ratio_max": w.amax((1, 2)),
    }
