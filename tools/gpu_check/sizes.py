"""Device and sizes of a process: those of the two published models on a GPU, tiny ones under Triton's interpreter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rlzero.kernels.backend import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class Sizes:
    """Attributes are named as in the operators' docstrings; defaults: one rank of several, so that float64 fits.

    Attributes:
        rows: of the largest batch; heads have ``dim`` numbers and are those of one of two tensor-parallel ranks.
        out: columns of a linear layer; sliced: the contracted dimension of a row-parallel one.
        width: of an expert; relu: of one with a squared ReLU; stored: experts with weights; experts: of the router.
        documents: lengths of a pack, on both sides of tiles, chunks, pages and ranges of keys.
        scan: heads, head dimension, groups, state size; scanned: lengths of its documents.
        chunk: new tokens of a sequence in a step that cuts prefills; tail: tokens that are decoded at last.
    """

    rows: int = 512
    hidden: int = 2048
    out: int = 2560
    sliced: int = 4096
    slices: int = 8
    heads: int = 16
    kv_heads: int = 2
    dim: int = 128
    norm_groups: int = 8
    width: int = 768
    relu: int = 1856
    stored: int = 32
    experts: int = 128
    top: int = 8
    vocabulary: int = 151_936
    padded: int = 152_064
    documents: tuple[int, ...] = (1, 5, 127, 128, 129, 300, 17, 1100, 40, 2100)
    channels: int = 6144
    scan: tuple[int, int, int, int] = (16, 64, 2, 128)
    scanned: tuple[int, ...] = (1, 101, 31, 32, 3, 33, 64, 290)
    chunk: int = 96
    tail: int = 12


TINY = Sizes(
    rows=18, hidden=64, out=24, sliced=64, slices=4, heads=4, kv_heads=2, dim=16, norm_groups=2, width=24, relu=40,
    stored=4, experts=16, top=4, vocabulary=300, padded=384, documents=(1, 17, 150), channels=40,
    scan=(4, 16, 2, 16), scanned=(1, 37, 32), chunk=70, tail=2,
)  # fmt: skip
SIZES = TINY if INTERPRETED else Sizes()


def randn(*shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    """Normal numbers of standard deviation ``scale``."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)
