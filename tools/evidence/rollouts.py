"""Rollouts in flight and the rule by which an update takes its batch: token by token, a version on each.

Every arm has ``slots``, each with one response. A tick draws one token for every response that is not finished, with
the newest weights, as after a refit in flight. An update takes B slots, which start new prompts at once.

- ``bound``: the project's rule. Prompts belong to updates beforehand, and those of update u start when version
  u - max_lag is there, so (max_lag + 1) B slots; update u waits for exactly its own. No token is older than max_lag.
- ``first_finished``: the control. Whatever finished first is taken, so that nothing bounds a token's age.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.evidence import policy
from tools.evidence.policy import END, LIMIT, VOCABULARY


class Rollouts:
    """The slots of all arms. ``tensors`` is their whole state."""

    def __init__(
        self, seeds: list[int], arms: Tensor, kappa: Tensor, slots: int, batch: int, rule: str, samples: int = 1
    ) -> None:
        """``arms`` int64 [arms]: which of ``seeds`` each arm has; ``kappa`` fp32 [arms]: logit noise of the sampler.

        ``samples`` responses in a row have one prompt.
        """
        if slots % 16 or batch % 16 or slots % batch or rule not in ("bound", "first_finished"):
            raise ValueError(f"{slots} slots, batches of {batch}, rule {rule}: take multiples of 16 and of the batch")
        self.seeds, self.arms, self.kappa, self.batch, self.rule = seeds, arms, kappa, batch, rule
        self.samples = samples
        self.rows = torch.arange(len(arms))[:, None]
        n, integer = (len(arms), slots), torch.int64
        self.tensors = {
            "prompt": torch.zeros(*n, VOCABULARY, dtype=integer),
            "answer": torch.zeros(*n, LIMIT, dtype=integer),
            "written": torch.zeros(*n, VOCABULARY, dtype=integer),
            "tokens": torch.zeros(*n, LIMIT, dtype=integer),
            "log_mu": torch.zeros(*n, LIMIT),
            "version": torch.zeros(*n, LIMIT, dtype=torch.int32),
            "gumbel": torch.zeros(*n, LIMIT, VOCABULARY),
            "normal": torch.zeros(*n, LIMIT, VOCABULARY),
            "last": torch.full(n, END),
            "length": torch.zeros(n, dtype=integer),
            "finished": torch.ones(n, dtype=integer),  # tick at which it was, 0 before
            "started": torch.zeros((), dtype=integer),
            "tick": torch.zeros((), dtype=integer),
        }

    def start(self, slots: Tensor, difficulty: Tensor) -> None:
        """The next prompts, the same for every arm of a seed but for their lengths; slots int64 [arms, n]."""
        t, at = self.tensors, (self.rows, slots)
        prompts = t["started"] + torch.arange(slots.shape[1])
        digits, uniform = policy.contents(self.seeds, 0, prompts // self.samples)
        draws, logits = (policy.noise(self.seeds, 0, kind, prompts, LIMIT) for kind in (policy.DRAW, policy.LOGITS))
        t["prompt"][at], t["answer"][at] = policy.make(digits[self.arms], uniform[self.arms], difficulty)
        t["gumbel"][at] = draws.float()[self.arms]
        t["normal"][at] = policy.normal(logits).float()[self.arms]
        t["tokens"][at], t["last"][at] = END, END
        for name in ("written", "length", "finished", "log_mu"):
            t[name][at] = 0
        t["started"] += slots.shape[1]

    def advance(self, params: policy.Params, version: int) -> None:
        """One token for each unfinished response of every arm."""
        t = self.tensors
        t["tick"] += 1
        active = t["finished"] == 0
        most = int(active.sum(1).max())
        if most == 0:
            return
        slots = (~active).to(torch.uint8).argsort(dim=1, stable=True)[:, : -(-most // 16) * 16]
        at, position = (self.rows, slots), t["length"][self.rows, slots].clamp(max=LIMIT - 1)
        live = active[at]
        state = (t["prompt"][at], t["written"][at], t["last"][at], position)
        log_mu = policy.log_probs(
            params,
            policy.features(*state, params["w1"].dtype),
            self.kappa[:, None, None] * t["normal"][self.rows, slots, position],
        )
        token = (log_mu + t["gumbel"][self.rows, slots, position]).argmax(-1)
        chosen = log_mu.gather(-1, token[..., None])[..., 0]
        where = (self.rows, slots, position)
        for name, new in (("tokens", token), ("log_mu", chosen)):
            t[name][where] = torch.where(live, new, t[name][where])
        t["version"][where] = torch.where(live, version, t["version"][where]).int()
        t["written"][self.rows, slots, token] += live
        t["last"][at] = torch.where(live, token, t["last"][at])
        t["length"][at] += live
        ended = live & ((token == END) | (position == LIMIT - 1))
        t["finished"][at] = torch.where(ended, t["tick"], t["finished"][at])

    def ready(self, update: int) -> bool:
        """Whether every arm can take the batch of ``update``."""
        if self.rule == "bound":
            return bool((self.tensors["finished"][self.rows, self._own(update)] > 0).all())
        return bool(((self.tensors["finished"] > 0).sum(1) >= self.batch).all())

    def take(self, update: int) -> Tensor:
        """The slots of the batch, int64 [arms, B]."""
        if self.rule == "bound":
            return self._own(update)
        finished = self.tensors["finished"]
        return torch.where(finished > 0, finished, 2**62).argsort(dim=1, stable=True)[:, : self.batch]

    def _own(self, update: int) -> Tensor:
        slots = self.tensors["finished"].shape[1]
        first = update * self.batch % slots
        return torch.arange(first, first + self.batch).expand(len(self.arms), -1)
