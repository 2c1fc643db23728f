"""One update's responses as flat tensors, the form in which they travel to the ranks, and a microbatch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import load, save
from torch import Tensor

from megatron_rlzero.rollout import Rollout


@dataclass
class Batch:
    """Responses one after the other; n tokens in all, B responses.

    Attributes:
        lengths: int64 [B], tokens of each response, prompt included.
        tokens: int64 [n].
        action_mask: bool [n].
        log_mu: fp32 [n], behaviour log-probability of each action token.
        advantages: fp32 [B].
    """

    lengths: Tensor
    tokens: Tensor
    action_mask: Tensor
    log_mu: Tensor
    advantages: Tensor

    @staticmethod
    def of(rollouts: Sequence[Rollout], advantages: Sequence[float] | np.ndarray | None = None) -> Batch:
        """The rollouts in their order; without advantages all are 0, for scoring."""
        join = lambda name, dtype: torch.from_numpy(  # noqa: E731
            np.concatenate([getattr(r, name) for r in rollouts]).astype(dtype)
        )
        return Batch(
            lengths=torch.tensor([len(r.tokens) for r in rollouts]),
            tokens=join("tokens", np.int64),
            action_mask=join("action_mask", np.bool_),
            log_mu=join("logprobs", np.float32),
            advantages=torch.zeros(len(rollouts))
            if advantages is None
            else torch.tensor(np.asarray(advantages), dtype=torch.float32),
        )

    def to_bytes(self) -> bytes:
        return save({f.name: getattr(self, f.name) for f in fields(self)})

    @staticmethod
    def from_bytes(data: bytes) -> Batch:
        return Batch(**load(data))

    @property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths


@dataclass
class Microbatch:
    """Whole responses packed for one forward pass; n tokens with the padding.

    Attributes:
        responses: indices into the batch; where[j] is the place in the batch of token j, -1 for padding.
        tokens, targets: int64 [1, n]; targets are the tokens one place on inside each response.
        log_mu, advantage, weight: fp32 [n], aligned with ``targets``: what belongs to the token that position predicts.
            ``weight`` is 1 / T_i at action tokens, else 0.
        owner: int64 [n], place in ``responses`` of each token's response; padding has one of its own.
        padding_mask: bool [1, n], True for padding; None where there is none.
    """

    responses: list[int]
    where: Tensor
    tokens: Tensor
    targets: Tensor
    log_mu: Tensor
    advantage: Tensor
    weight: Tensor
    owner: Tensor
    packed: PackedSeqParams
    padding_mask: Tensor | None

    @staticmethod
    def of(batch: Batch, responses: list[int], multiple: int, device: torch.device) -> Microbatch:
        """Packs ``responses``; pads with a document of its own to a multiple of ``multiple`` tokens, at least one.

        Padding repeats token id 0, and has weight 0.
        """
        starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
        where = torch.cat(
            [torch.arange(starts[i], starts[i] + lengths[i]) for i in responses] or [torch.empty(0).long()]
        )
        last = torch.tensor([lengths[i] for i in responses], dtype=torch.long).cumsum(0) - 1
        following = (where + 1).index_fill(0, last, 0) if len(where) else where
        predicts = torch.ones(len(where), dtype=torch.bool).index_fill(0, last, False)
        action = batch.action_mask[following] & predicts
        owner = torch.repeat_interleave(
            torch.arange(len(responses)), torch.tensor([lengths[i] for i in responses]).long()
        )
        counts = torch.zeros(len(responses)).index_add(0, owner, action.float())
        weight = torch.where(action, 1 / counts[owner], 0.0)
        advantage = batch.advantages[torch.tensor(responses, dtype=torch.long)][owner]

        n = len(where)
        padding = max(-n % multiple, 0 if n else multiple)
        fill = lambda x, value: torch.cat((x, x.new_full((padding,), value))).to(device)  # noqa: E731
        bounds = [0, *(last + 1).tolist(), *([n + padding] if padding else [])]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        longest = max(b - a for a, b in pairwise(bounds))
        return Microbatch(
            responses=responses,
            where=fill(where, -1),
            tokens=fill(batch.tokens[where], 0)[None],
            targets=fill(torch.where(predicts, batch.tokens[following], 0), 0)[None],
            log_mu=fill(batch.log_mu[following], 0.0),
            advantage=fill(advantage, 0.0),
            weight=fill(weight, 0.0),
            owner=fill(owner, len(responses)),
            packed=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            padding_mask=fill(torch.zeros(n, dtype=torch.bool), True)[None] if padding else None,
        )
