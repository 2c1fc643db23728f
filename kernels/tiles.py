"""Tile constants: the shapes that fix the order of every reduction. Never tuned at run time."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Rows of a matrix product are padded to a multiple of this, so that no call takes a small-batch code path.
ROWS = 16
#: Columns of a product for each thread, at least: MKL has other code for fewer than 12 (fp32, AMD EPYC with AVX2).
COLUMNS = 16
#: Dimensions of a batched product are padded to a multiple of this: at others its bits depend on the batch.
WIDTH = 8
#: Keys are multiplied with values in blocks of this many, added from left to right.
KEYS = 128
#: Queries of a long document are taken in chunks of this many, each recomputed in the backward pass.
QUERIES = 256
#: The vocabulary is summed in blocks of this many ids, counted from id 0, then by a halving tree.
VOCABULARY = 128
#: Elements of fp32 logits that exist at one time; on a GPU, where every time reads the whole head.
LOGITS, GPU_LOGITS = 2**22, 2**27

#: Tokens of a chunk of the Mamba scan, counted from position 0 of a sequence; the state moves over whole chunks only.
CHUNK = 32
#: Decays of the scan up to this are zero: what they leave is far below a rounding, and denormal numbers are slow.
FAINT = 2.0**-80
#: Rows of the products in which the scan computes one new token: the library's code for many rows starts here.
MAMBA_ROWS = 8


def columns() -> int:
    """Columns from which on a product has the same bits for any number of them."""
    return COLUMNS * torch.get_num_threads()


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
    """Sizes of a Triton kernel: rows, columns, the contracted dimension, and the launch's options.

    ``split``: keys of attention that form a range, whose sums are made apart and then added to those of the others.
    """

    m: int
    n: int = 0
    k: int = 0
    split: int = 0
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True)
class Gpu:
    """Tiles of one architecture. They fix the order of sums: learner and engine run on GPUs of one architecture.

    Attributes:
        product: of bf16 matrices; of a grouped product too, whose rows belong to experts.
        product_fp32: the same of fp32 matrices, which no tensor core multiplies exactly.
        row: elementwise kernels and those of whole rows; m rows at a time where rows are short.
        tree: n columns of which m rows are added at a time, a power of two.
        router: m tokens.
        vocabulary: m rows of logits, of which blocks of VOCABULARY ids are taken in turn.
        attention: m rows of queries (of the heads that share keys), n keys at a time; gradients of queries have its m.
        attention_backward: n keys; for their gradients m rows at a time.
        attention_fp32: of all that, in fp32, whose products keep their operands in registers; the m of ``attention``.
        scan: m channels of a head's state and n of its columns at a time; chunks have CHUNK tokens.
        conv: m tokens, n channels.
    """

    product: Tile
    product_fp32: Tile
    row: Tile
    tree: Tile
    router: Tile
    vocabulary: Tile
    attention: Tile
    attention_fp32: Tile
    attention_backward: Tile
    scan: Tile
    conv: Tile

    def product_of(self, dtype: torch.dtype) -> Tile:
        """That of products of matrices of ``dtype``."""
        return self.product_fp32 if dtype == torch.float32 else self.product


_AMPERE = Gpu(
    product=Tile(m=64, n=128, k=64, warps=8, stages=3),
    product_fp32=Tile(m=64, n=32, k=16, warps=4, stages=2),
    row=Tile(m=16, warps=4),
    tree=Tile(m=64, n=64, warps=4),
    router=Tile(m=4, warps=4),
    vocabulary=Tile(m=4, warps=4),
    attention=Tile(m=64, n=32, split=1024, warps=4, stages=2),
    attention_fp32=Tile(m=64, n=16, split=1024, warps=16, stages=2),
    attention_backward=Tile(m=32, n=64, warps=4, stages=2),
    scan=Tile(m=32, n=32, warps=8),
    conv=Tile(m=32, n=64, warps=4),
)
#: compute capability -> tiles
GPUS = {80: _AMPERE}
GPUS[90] = replace(
    _AMPERE,
    product=Tile(m=128, n=128, k=64, warps=8, stages=3),
    attention=Tile(m=64, n=64, split=1024, warps=4, stages=2),
    attention_backward=Tile(m=64, n=64, warps=4, stages=2),
)
GPUS[100] = replace(
    GPUS[90],
    product=Tile(m=128, n=64, k=64, warps=8, stages=3),
    attention=Tile(m=64, n=32, split=1024, warps=4, stages=3),
    attention_fp32=Tile(m=64, n=32, split=1024, warps=32),
)


#: of the interpreter, whose time is that of the operations on tiles, and of the elements where they are many
SMALL = replace(
    _AMPERE,
    product=Tile(m=32, n=64, k=64),
    product_fp32=Tile(m=32, n=64, k=32),
    router=Tile(m=16),
    attention=Tile(m=128, n=64, split=128),
    attention_fp32=Tile(m=128, n=64, split=128),
    attention_backward=Tile(m=64, n=64),
    scan=Tile(m=32, n=64),
)


@lru_cache
def gpu(device: torch.device) -> Gpu:
    """Tiles of the architecture of ``device``; under the interpreter, on a CPU, small ones.

    Raises:
        RuntimeError: the kernels have not been compiled for that architecture.
    """
    if device.type != "cuda":
        return SMALL
    if (found := capability(device)) not in GPUS:
        raise RuntimeError(
            f"kernels = aligned: no tiles for compute capability {found / 10}; there are some for "
            f"{', '.join(str(known / 10) for known in GPUS)} (kernels/tiles.py)"
        )
    return GPUS[found]


def capability(device: torch.device) -> int:
    """The compute capability whose tiles are those of ``device``, a GPU: the nearest below, or its own without one."""
    major, minor = torch.cuda.get_device_capability(device)
    own = 10 * major + minor
    return max((known for known in GPUS if known // 10 == major and known <= own), default=own)
