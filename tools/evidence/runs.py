"""Training of many arms in one process: the loop, its log per update, checkpoints from which it goes on to the bit."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress, TextColumn
from torch import Tensor

from megatron_rlzero.objectives import OBJECTIVES
from tools.evidence import policy
from tools.evidence.policy import END, LIMIT, LONGEST, Learner
from tools.evidence.rollouts import Rollouts

#: per update and arm
METRICS = (
    "k3", "renyi3", "ess", "ratio_max", "log_ratio_rms", "differing", "lag_mean", "lag_max",
    "entropy", "grad_norm", "change", "loss", "pass", "length", "difficulty",
)  # fmt: skip
#: per held-out evaluation and arm: sampled pass@1, share of tokens whose log-prob differs in a byte
HELD_OUT = ("pass", "differing")
#: of the warm-up by maximum likelihood: steps, responses, learning rate, longest prompt
WARM_UP = (300, 32, 3e-3, 4.0)
#: the curriculum: pass@1 aimed at, and the longest prompt at first
TARGET, FIRST = 0.55, 6.0
EVALUATED = 128


@dataclass(frozen=True)
class Arm:
    """One training run. ``clip`` is the largest norm of the gradient, inf for none."""

    seed: int
    kappa: float
    rate: float
    clip: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What all arms of a run share. ``slots`` is (max_lag + 1) * batch under the rule ``bound``.

    ``ticks`` is how many tokens each response in flight gets between two updates at least; an update that has to wait
    for its batch makes it more. ``gain`` is the curriculum's, change of the longest prompt per update and unit of
    pass@1; with 0 the difficulty stays at FIRST.
    """

    arms: tuple[Arm, ...]
    updates: int
    slots: int
    rule: str = "bound"
    ticks: int = 0
    batch: int = 32
    every: int = 50
    gain: float = 0.2
    dtype: torch.dtype = torch.bfloat16
    objective: str = "reinforce_zero"
    samples: int = 1


class Run:
    """The state of a plan's arms, and how it moves by one update."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seeds = sorted({arm.seed for arm in plan.arms})
        self.index = torch.tensor([self.seeds.index(arm.seed) for arm in plan.arms])
        kappa, rate, clip = (torch.tensor([getattr(arm, k) for arm in plan.arms]) for k in ("kappa", "rate", "clip"))
        warm = warm_up(self.seeds, plan.dtype)
        self.learner = Learner(
            {k: p[self.index].clone() for k, p in warm.items()}, rate, clip, plan.dtype, plan.objective, plan.samples
        )
        self.rollouts = Rollouts(self.seeds, self.index, kappa, plan.slots, plan.batch, plan.rule, plan.samples)
        self.difficulty = torch.full((len(plan.arms),), FIRST)
        arms = [[getattr(arm, k) for k in ("seed", "kappa", "rate", "clip")] for arm in plan.arms]
        self.arms = torch.tensor(arms, dtype=torch.float64)
        shared = (plan.slots, plan.rule == "bound", plan.ticks, plan.batch, plan.every, plan.gain, plan.dtype.itemsize)
        shared += (list(OBJECTIVES).index(plan.objective), plan.samples)
        self.shared = torch.tensor(shared, dtype=torch.float64)
        self.log = torch.zeros(plan.updates, len(plan.arms), len(METRICS))
        self.held_out = torch.zeros(plan.updates // plan.every + 1, len(plan.arms), len(HELD_OUT))
        self.done = torch.zeros((), dtype=torch.int64)
        self.seconds = torch.zeros((), dtype=torch.float64)
        for first in range(0, plan.slots, plan.batch):
            self.rollouts.start(torch.arange(first, first + plan.batch).expand(len(plan.arms), -1), self.difficulty)
        self.probe = Probe(self.seeds, self.index)
        self.held_out[0] = self.probe(self.learner)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the future depends on, by name; they are the run's own, not copies."""
        parts = {"learner": self.learner.params | self.learner.moments, "rollouts": self.rollouts.tensors}
        state = {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
        state |= {"steps": self.learner.steps, "alive": self.learner.alive, "difficulty": self.difficulty}
        return state | {k: getattr(self, k) for k in ("log", "held_out", "done", "seconds", "arms", "shared")}

    def update(self) -> None:
        u, plan, rollouts = int(self.done), self.plan, self.rollouts
        weights, ticks = self.learner.cast(), 0
        while ticks < plan.ticks or not rollouts.ready(u):
            rollouts.advance(weights, u)
            ticks += 1
        slots = rollouts.take(u)
        t = {k: rollouts.tensors[k][rollouts.rows, slots] for k in ("prompt", "answer", "tokens", "log_mu", "version")}
        lengths = rollouts.tensors["length"][rollouts.rows, slots]
        mask = torch.arange(LIMIT) < lengths[..., None]
        used = int(lengths.max())
        cut = {k: t[k][..., :used] for k in ("tokens", "log_mu")}
        rewards = policy.reward(t["tokens"], t["answer"])
        gradients, found = self.learner.gradients(
            t["prompt"], cut["tokens"], cut["log_mu"], (mask / lengths[..., None])[..., :used], rewards
        )
        norm, change = self.learner.step(gradients, found["loss"])
        mask, age = mask[..., :used], torch.where(mask, u - t["version"], 0)[..., :used]
        if plan.rule == "bound" and int(age.max()) > plan.slots // plan.batch - 1:
            raise RuntimeError(f"update {u} has a token of lag {int(age.max())}; {plan.slots} slots allow less")
        n = mask.sum((1, 2))
        d, same = torch.where(mask, found["log_pi"] - cut["log_mu"], 0.0), mask & (age == 0)
        row = policy.metrics(found["log_pi"], cut["log_mu"], mask) | {
            "log_ratio_rms": (d.pow(2).sum((1, 2)) / n).sqrt(),
            "differing": (same & (d != 0)).sum((1, 2)) / same.sum((1, 2)).clamp(min=1),
            "lag_mean": age.sum((1, 2)) / n,
            "lag_max": age.amax((1, 2)),
            "entropy": torch.where(mask, found["entropy"], 0.0).sum((1, 2)) / n,
            "grad_norm": norm,
            "change": change,
            "loss": found["loss"],
            "pass": rewards.mean(1),
            "length": lengths.float().mean(1),
            "difficulty": self.difficulty,
        }
        self.log[u] = torch.stack([row[name].float() for name in METRICS], dim=-1)
        self.difficulty.copy_((self.difficulty + plan.gain * (rewards.mean(1) - TARGET)).clamp(1.0, float(LONGEST)))
        rollouts.start(slots, self.difficulty)
        self.done += 1
        if (u + 1) % plan.every == 0:
            self.held_out[(u + 1) // plan.every] = self.probe(self.learner)

    def run(self, file: Path, chunk: int = 250, stop: int | None = None) -> None:
        """Goes on from ``file`` if it is there, to the end or to ``stop`` updates; saves every ``chunk`` updates."""
        if file.exists():
            saved, state = torch.load(file, weights_only=True), self.state()
            if not all(x.shape == saved[k].shape for k, x in state.items()) or not all(
                torch.equal(state[k], saved[k]) for k in ("arms", "shared")
            ):
                raise ValueError(f"{file} is of another plan; remove it or choose another --out")
            for name, tensor in state.items():
                tensor.copy_(saved[name])
        last = self.plan.updates if stop is None else stop
        columns = (*Progress.get_default_columns(), TextColumn("{task.fields[note]}"))
        with Progress(*columns, refresh_per_second=1) as progress:
            task = progress.add_task(file.stem, total=last, completed=int(self.done), note="")
            while int(self.done) < last:
                start = time.perf_counter()
                for _ in range(min(chunk - int(self.done) % chunk, last - int(self.done))):
                    self.update()
                    progress.advance(task)
                self.seconds += time.perf_counter() - start
                save(file, self.state())
                note = f"pass@1 {float(self.log[int(self.done) - 1, :, METRICS.index('pass')].mean()):.2f}"
                progress.update(task, note=note)


class Probe:
    """Held-out prompts of every length, evenly: sampled from the policy itself with noise that never changes."""

    def __init__(self, seeds: list[int], index: Tensor) -> None:
        prompts = torch.arange(EVALUATED)
        digits, uniform = policy.contents(seeds, -1, prompts)
        longest = torch.full((len(index),), float(LONGEST))
        self.prompt, self.answer = policy.make(digits[index], uniform[index], longest)
        self.gumbel = policy.noise(seeds, -1, policy.DRAW, prompts, LIMIT).float()[index]

    def __call__(self, learner: Learner) -> Tensor:
        """HELD_OUT of every arm, [arms, 2]; the second from scoring what was sampled as the learner does."""
        params, shape = learner.cast(), self.prompt.shape[:2]
        tokens, log_mu = torch.full((*shape, LIMIT), END), torch.zeros(*shape, LIMIT)
        written, last = torch.zeros_like(self.prompt), torch.full(shape, END)
        running, mask = torch.ones(shape, dtype=torch.bool), torch.zeros(*shape, LIMIT, dtype=torch.bool)
        for position in range(LIMIT):
            at = torch.full(shape, position)
            log_p = policy.log_probs(params, policy.features(self.prompt, written, last, at, learner.dtype))
            token = torch.where(running, (log_p + self.gumbel[:, :, position]).argmax(-1), END)
            tokens[..., position], mask[..., position], last = token, running, token
            log_mu[..., position] = log_p.gather(-1, token[..., None])[..., 0]
            written += policy.one_hot(token)
            running = running & (token != END)
        scored = policy.log_probs(params, policy.states(self.prompt, tokens, learner.dtype))
        log_pi = scored.gather(-1, tokens.reshape(shape[0], -1, 1)).view(tokens.shape)
        differing = (mask & (log_pi != log_mu)).sum((1, 2)) / mask.sum((1, 2))
        return torch.stack([policy.reward(tokens, self.answer).mean(1), differing], dim=-1)


def warm_up(seeds: list[int], dtype: torch.dtype) -> policy.Params:
    """Parameters of each seed after some steps of maximum likelihood on right answers to short prompts."""
    steps, batch, rate, longest = WARM_UP
    n = len(seeds)
    learner = Learner(policy.initial(seeds), torch.full((n,), rate), torch.ones(n), dtype)
    for step in range(steps):
        digits, uniform = policy.contents(seeds, -2, torch.arange(step * batch, (step + 1) * batch))
        prompt, answer = policy.make(digits, uniform, torch.full((n,), longest))
        lengths = (answer != END).sum(-1, keepdim=True) + 1
        weight = (torch.arange(LIMIT) < lengths) / lengths
        leaves = {name: p.detach().requires_grad_() for name, p in learner.params.items()}
        whole = policy.log_probs({k: p.to(dtype) for k, p in leaves.items()}, policy.states(prompt, answer, dtype))
        chosen = whole.gather(-1, answer.reshape(n, -1, 1)).view(answer.shape)
        loss = -(weight * chosen).sum((1, 2)) / batch
        found = torch.autograd.grad(loss.sum(), list(leaves.values()))
        learner.step(dict(zip(leaves, found, strict=True)), loss.detach())
    return learner.params


def save(file: Path, state: dict[str, Tensor]) -> None:
    """Written beside, then renamed: what lies at ``file`` is always whole."""
    beside = file.with_suffix(".part")
    torch.save(state, beside)
    os.replace(beside, file)


def machine() -> dict[str, object]:
    """What the figures were computed on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def settings(plan: Plan) -> dict[str, object]:
    """What a reader needs to repeat a plan, beside its arms."""
    return {
        "batch": plan.batch,
        "slots": plan.slots,
        "rule": plan.rule,
        "ticks": plan.ticks,
        "updates": plan.updates,
        "dtype": str(plan.dtype),
        "objective": plan.objective,
        "samples_per_prompt": plan.samples,
        "parameters": sum(p[0].numel() for p in policy.initial([0]).values()),
        "vocabulary": policy.VOCABULARY,
        "longest_prompt": LONGEST,
        "logit_rms": policy.SCALE,
        "adam": [*policy.BETAS, policy.EPS],
        "learning_rate_rises_over": policy.RISE,
        "warm_up": dict(zip(("steps", "responses", "rate", "longest"), WARM_UP, strict=True)),
        "curriculum": {"pass": TARGET, "gain": plan.gain, "first": FIRST},
        "held_out_prompts": EVALUATED,
    }
