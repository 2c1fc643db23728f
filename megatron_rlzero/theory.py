"""What the importance weight promises, checked in numbers: identities, an enumerated tree, and a Gaussian model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: an identity holds if both sides agree within this, float64
TOLERANCE = 1e-12
#: of the Gaussian model
LEARNING_RATE, S, KAPPAS, UPDATES, SAMPLES = 0.6, 0.2, (0.0, 0.2), 200, 200_000
TABLE = "kappa         a  exact at update 200  simulated, 200,000  stable below"


def identities(actions: int = 50, seed: int = 0) -> dict[str, float]:
    """Largest difference of the two sides of every identity at one fixed history.

    p is the policy, q the sampler, s = grad log p by the logits of p, A any advantage, w = p / q. Score centering uses
    Cov_q(A, s) for the gradient (FlashREINFORCE, 2026); it is exact for q = p alone, by the fifth identity.
    """
    generator = torch.Generator().manual_seed(seed)
    p_logits, noise, advantage = torch.randn(3, actions, generator=generator, dtype=torch.float64)
    p, q = p_logits.softmax(0), (p_logits + 0.5 * noise).softmax(0)
    score = torch.eye(actions, dtype=torch.float64) - p  # [action, logit]

    def mean(r: Tensor, x: Tensor) -> Tensor:
        return (r[:, None] * x).sum(0)

    def covariance(r: Tensor) -> Tensor:
        return mean(r, advantage[:, None] * score) - (r * advantage).sum() * mean(r, score)

    weighted = (p / q)[:, None] * score
    true = mean(p, advantage[:, None] * score)
    centred = mean(q, advantage[:, None] * (score - mean(q, score)))
    sides = {
        "E_p[A s] = Cov_p(A, s)": (true, covariance(p)),
        "E_q[A s] = Cov_q(A, s) + E_q[A] E_q[s]": (
            mean(q, advantage[:, None] * score),
            covariance(q) + (q * advantage).sum() * mean(q, score),
        ),
        "E_q[w s] = 0": (mean(q, weighted), torch.zeros_like(true)),
        "E_q[w A s] = E_p[A s]": (mean(q, advantage[:, None] * weighted), true),
        "score centering: E_q[A (s - E_q s)] = Cov_q(A, s)": (centred, covariance(q)),
        "its error: g_SC - g* = Cov_q(A, s) - Cov_p(A, s)": (centred - true, covariance(q) - covariance(p)),
    }
    return {name: float((a - b).abs().max()) for name, (a, b) in sides.items()}


class Tree:
    """A decision tree of two steps, enumerated: what token weights correct over histories and what they do not.

    The loss is the objective's, E_q[-(1/T) sum_t A w_t] with T = 2 and w_t = p(a_t | h_t) / q(a_t | h_t); its gradient
    goes through w alone, and is compared with that of the true objective, -E_p[A] / T.
    """

    reward = torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.7, 0.0], [0.1, 0.0, 0.9]], dtype=torch.float64)

    def __init__(self) -> None:
        self.policy = self.random(0)
        self.sampler = tuple(p + noise for p, noise in zip(self.policy, self.random(1), strict=True))

    @staticmethod
    def random(seed: int) -> tuple[Tensor, Tensor]:
        """Logits of the first step [A], and of the second one for each first action [A, A]."""
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(3, generator=generator, dtype=torch.float64)
        return first, torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def gradients(self, objective: Callable[..., Tensor], sampler: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """By the policy's logits, as (first step [A], second step [A, A])."""
        logits = tuple(x.clone().requires_grad_() for x in self.policy)
        p1, p2 = (x.softmax(-1) for x in logits)
        q1, q2 = (x.softmax(-1) for x in sampler)
        return torch.autograd.grad(objective(p1[:, None], p2, q1[:, None], q2), logits)

    def true(self, p1: Tensor, p2: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
        return -(p1 * p2 * self.reward).sum() / 2

    def token_is(self, p1: Tensor, p2: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
        return -(q1 * q2 * self.reward * (p1 / q1 + p2 / q2)).sum() / 2

    def sequence_is(self, p1: Tensor, p2: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
        return -(q1 * q2 * self.reward * (p1 * p2) / (q1 * q2)).sum() / 2

    def uncorrected(self, p1: Tensor, p2: Tensor, q1: Tensor, q2: Tensor) -> Tensor:
        return -(q1 * q2 * self.reward * (p1.log() + p2.log())).sum() / 2

    def error(self, objective: Callable[..., Tensor], sampler: tuple[Tensor, Tensor] | None = None) -> float:
        """Norm of the gradient's error over that of the true gradient."""
        sampler = sampler or self.sampler
        found, wanted = (torch.cat([g.flatten() for g in self.gradients(f, sampler)]) for f in (objective, self.true))
        return float((found - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class Gaussian:
    """One-sample importance-weighted REINFORCE on a Gaussian policy whose sampler is off by kappa standard deviations.

    Policy N(theta, s^2), sampler N(theta + eps kappa s, s^2) with a fair random sign eps at every update, reward
    -(y - theta*)^2 / 2, the exact value as baseline, E[e_0^2] = 1 for the error e = theta - theta*. Then
    E[e'^2] = a E[e^2] + b. Learning rate and s are reconstructed from the published errors, 0.30 where sampler and
    policy match and 68.27 at update 200 for kappa = 0.2, which they give to every printed digit.
    """

    kappa: float
    learning_rate: float = LEARNING_RATE
    s: float = S

    @property
    def variance(self) -> float:
        """V = E_q[w^2 z^4] = e^(k^2) (3 + 6 k^2 + k^4)."""
        return exp(self.kappa**2) * (3 + 6 * self.kappa**2 + self.kappa**4)

    @property
    def a(self) -> float:
        """1 - 2 lr + lr^2 V."""
        return 1 - 2 * self.learning_rate + self.learning_rate**2 * self.variance

    @property
    def b(self) -> float:
        """lr^2 s^2 / 4 e^(k^2) (10 + 34 k^2 + 13 k^4 + k^6)."""
        k = self.kappa
        return (self.learning_rate * self.s) ** 2 / 4 * exp(k**2) * (10 + 34 * k**2 + 13 * k**4 + k**6)

    @property
    def stable(self) -> float:
        """The learning rate below which a < 1: 2 / V."""
        return 2 / self.variance

    def errors(self, updates: int) -> NDArray[np.float64]:
        """E[e^2] after 0, 1, ... updates, exactly."""
        result = np.ones(updates + 1)
        for u in range(updates):
            result[u + 1] = self.a * result[u] + self.b
        return result

    def simulate(self, updates: int, samples: int, seed: int = 0) -> NDArray[np.float64]:
        """An unbiased estimate of ``errors``: an update moves E[e^2] by the mean over ``samples`` of its sampled steps.

        The mean of e^2 over whole runs would not do: its variance grows without bound at kappa = 0 already.
        """
        random = np.random.default_rng(seed)
        result = np.ones(updates + 1)
        for u in range(updates):
            shift = self.kappa * (2.0 * random.integers(2, size=samples) - 1)
            z = random.standard_normal(samples) + shift
            w = np.exp(shift**2 / 2 - shift * z)  # N(z; 0, 1) / N(z; shift, 1)
            e = np.sqrt(result[u])
            result[u + 1] = np.mean((e - self.learning_rate * w * (e * z**2 + self.s * (z**3 - z) / 2)) ** 2)
        return result


def report() -> tuple[list[str], bool]:
    """Lines that say what was checked and found, and whether every identity holds."""
    found, tree = identities(), Tree()
    lines = ["identities at one history, 50 actions, float64: largest difference of the two sides"]
    lines += [f"  {name:55s} {difference:.1e}" for name, difference in found.items()]
    lines += ["relative error of the gradient on an enumerated tree of two steps, sampler off-policy"]
    lines += [
        f"  {name:55s} {tree.error(objective):.4f}"
        for name, objective in (
            ("token weights (the objective)", tree.token_is),
            ("no correction", tree.uncorrected),
            ("weights of whole sequences", tree.sequence_is),
        )
    ]
    lines += [f"Gaussian model, learning rate {LEARNING_RATE}, s {S}: mean squared error", f"  {TABLE}"]
    for kappa in KAPPAS:
        model = Gaussian(kappa)
        exact, simulated = model.errors(UPDATES)[-1], model.simulate(UPDATES, SAMPLES)[-1]
        lines.append(f"  {kappa:5g} {model.a:9.6f} {exact:20.4f} {simulated:20.2f} {model.stable:14.4f}")
    return lines, max(found.values()) < TOLERANCE


def draw(path: str | Path) -> Path:
    """The Gaussian model with and without a mismatch, exact and simulated, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kappa, colour in zip(KAPPAS, ("#2a6fbb", "#d9730d"), strict=True):
        model = Gaussian(kappa)
        axes.plot(model.errors(UPDATES), color=colour, label=f"kappa = {kappa:g}, exact")
        axes.plot(model.simulate(UPDATES, SAMPLES), color=colour, linestyle=":", label="simulated steps")
    axes.set(xlabel="update", ylabel="mean squared error of the policy's mean", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)
    return Path(path)
