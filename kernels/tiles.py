"""Tile constants: the shapes that fix the order of every reduction. Never tuned at run time."""

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
