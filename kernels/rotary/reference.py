"""Rotary position embedding; the table is computed in float64 and cast once."""

import torch
from torch import Tensor


def rotary_table(length: int, dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """cos and sin of position * base^(-2i/dim) (Su et al., RoFormer, 2021).

    Returns:
        fp32 [length, 2, dim // 2]: cos at index 0, sin at index 1.
    """
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=1).float()


def apply_rotary(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotates the halves of every head (the layout of Hugging Face checkpoints, not the interleaved one).

    Args:
        x: [tokens, heads, dim].
        table: what ``rotary_table`` returns.
        positions: int64 [tokens], position of each token in its own document.

    Returns:
        Like ``x``; computed in fp32 and rounded once.
    """
    cos, sin = table[positions].unsqueeze(1).unbind(2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
