"""RMSNorm in fp32 with one rounding at the end."""

from torch import Tensor
from torch.nn import functional as F

from megatron_rlzero.kernels.tiles import pad_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).

    Args:
        x: [..., H].
        weight: [H].

    Returns:
        [..., H], dtype of ``x``; everything before the last rounding is fp32.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = F.rms_norm(pad_rows(rows).float(), weight.shape, weight.float(), eps)[: rows.shape[0]]
    return y.to(x.dtype).reshape(x.shape)
