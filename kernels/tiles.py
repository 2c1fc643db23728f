"""Tile constants: the shapes that fix the order of every reduction. Never tuned at run time."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Rows of a matrix product are padded to a multiple of this, so that no call takes a small-batch code path.
ROWS = 16
#: Dimensions of a batched product are padded to a multiple of this: at others its bits depend on the batch.
WIDTH = 8
#: Keys are multiplied with values in blocks of this many, added from left to right.
KEYS = 128
#: Queries of a long document are taken in chunks of this many, each recomputed in the backward pass.
QUERIES = 256
#: The vocabulary is summed in blocks of this many ids, counted from id 0, then by a halving tree.
VOCABULARY = 128
#: Elements of fp32 logits that exist at one time.
LOGITS = 2**22

#: Tokens of a chunk of the Mamba scan, counted from position 0 of a sequence; the state moves over whole chunks only.
CHUNK = 32
#: Decays of the scan up to this are zero: what they leave is far below a rounding, and denormal numbers are slow.
FAINT = 2.0**-80
#: Rows of the products in which the scan computes one new token: the library's code for many rows starts here.
MAMBA_ROWS = 8


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``n``."""
    return -(-n // multiple) * multiple


def pad_rows(x: Tensor, rows: int = ROWS) -> Tensor:
    """Appends rows of zeros to ``x`` [n, ...] until n is a multiple of ``rows``; ``x`` itself if it is."""
    missing = -x.shape[0] % rows
    return pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by a halving tree of elementwise adds, the same order for every batch.

    Pads to a power of two with zeros; shape [..., n] -> [...].
    """
    n = x.shape[-1]
    width = 1 << max(n - 1, 0).bit_length()
    if width != n:
        x = pad(x, (0, width - n))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


@dataclass(frozen=True)
class Tile:
    """Sizes of a Triton kernel: rows, columns, bytes of the contracted dimension per row, and the launch's options."""

    m: int
    n: int = 0
    bytes: int = 0
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Gpu:
    """Tiles of one architecture. They fix the order of sums: learner and engine run on GPUs of one architecture.

    Attributes:
        product: of matrices; of a grouped product too, whose rows belong to experts.
        row: elementwise kernels and those of whole rows; m rows at a time where rows are short.
        tree: n columns of which m rows are added at a time, a power of two.
        router: m tokens.
        vocabulary: m rows of logits, of which blocks of VOCABULARY ids are taken in turn.
        attention: m rows of queries (of the heads that share keys), n keys at a time; backward too, see its file.
        scan: m channels of a head's state; chunks have CHUNK tokens.
        conv: m tokens, n channels.
    """

    product: Tile
    row: Tile
    tree: Tile
    router: Tile
    vocabulary: Tile
    attention: Tile
    attention_backward: Tile
    scan: Tile
    conv: Tile


_AMPERE = Gpu(
    product=Tile(m=64, n=128, bytes=128, warps=4, stages=3),
    row=Tile(m=16, warps=4),
    tree=Tile(m=64, n=64, warps=4),
    router=Tile(m=4, warps=4),
    vocabulary=Tile(m=4, warps=4),
    attention=Tile(m=64, n=64, warps=4, stages=2),
    attention_backward=Tile(m=64, n=64, warps=4, stages=2),
    scan=Tile(m=16, warps=2),
    conv=Tile(m=32, n=64, warps=4),
)
#: compute capability -> tiles
GPUS = {80: _AMPERE, 90: replace(_AMPERE, product=Tile(m=128, n=128, bytes=128, warps=8, stages=3))}
GPUS[100] = GPUS[90]


#: of the interpreter, whose time is that of the elements in a tile
SMALL = replace(_AMPERE, product=Tile(m=16, n=32, bytes=128))


@lru_cache
def gpu(device: torch.device) -> Gpu:
    """Tiles of the architecture of ``device``; under the interpreter, on a CPU, small ones.

    Raises:
        RuntimeError: the kernels have not been compiled for that architecture.
    """
    if device.type != "cuda":
        return SMALL
    major, minor = torch.cuda.get_device_capability(device)
    known = [capability for capability in GPUS if capability // 10 == major and capability <= 10 * major + minor]
    if not known:
        raise RuntimeError(
            f"kernels = aligned: no tiles for compute capability {major}.{minor}; there are some for "
            f"{', '.join(f'{c // 10}.{c % 10}' for c in GPUS)} (kernels/tiles.py)"
        )
    return GPUS[max(known)]
