"""Rotary position embedding in torch; the table, which every form takes, is computed in float64 and cast once."""

from math import pi

import torch
from torch import Tensor

#: factor, low and high frequency factor, original length: the settings of Llama 3.1's scaling
Llama3Scaling = tuple[float, float, float, float]


def rotary_table(
    length: int, dim: int, base: float, device: torch.device | None = None, scaling: Llama3Scaling | None = None
) -> Tensor:
    """cos and sin of position * base^(-2i/dim) (Su et al., RoFormer, 2021).

    Args:
        scaling: see ``llama3_frequencies``; None for frequencies as they are.

    Returns:
        fp32 [length, 2, dim // 2] on ``device``, by default torch's: cos at index 0, sin at index 1. Computed in host
        memory, by one library for all devices.
    """
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling is not None:
        frequency = llama3_frequencies(frequency, *scaling)
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=1).float().to(device or torch.get_default_device())


def llama3_frequencies(frequency: Tensor, factor: float, low: float, high: float, original_length: float) -> Tensor:
    """Frequencies of Llama 3.1 for texts longer than it was first trained on (The Llama 3 Herd of Models, 2024).

    Those that turn more than ``high`` times in ``original_length`` positions stay, those that turn less than ``low``
    times are divided by ``factor``, between them the share that stays grows linearly with the number of turns.
    """
    stays = ((frequency * original_length / (2 * pi) - low) / (high - low)).clamp(0, 1)
    return (1 - stays) * frequency / factor + stays * frequency


def apply_rotary(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """See ``dispatch.apply_rotary``."""
    cos, sin = table[positions].unsqueeze(1).unbind(2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
