"""A rank's part of the vocabulary, and what the ranks tell each other about their parts."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Shard:
    """Ids from ``first`` on; those from ``vocab_size`` on are padding. ``group``: None for one rank.

    ``temperature`` divides the logits.
    """

    first: int
    vocab_size: int
    temperature: float
    group: ProcessGroup | None

    def whole(self, blocks: Tensor) -> Tensor:
        """[rows, blocks] of this rank -> [rows, blocks of all ranks], in the order of the ids."""
        if self.group is None:
            return blocks
        parts = [torch.empty_like(blocks) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, blocks.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def reduce(self, x: Tensor, op: dist.ReduceOp) -> Tensor:
        """Over the ranks, in place. SUM is for tensors of which one rank has each element, and the others zeros."""
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)
        return x
