"""The one arithmetic of a chunk of the Mamba-2 scan: products of fixed shape over the tokens of a chunk.

With L_t the sum of A dt up to token t of its chunk, and h the state before the chunk (Dao and Gu, Mamba-2, 2024):

    y_t = exp(L_t) h C_t + sum_{s <= t} exp(L_t - L_s) dt_s (C_t . B_s) x_s
    h'  = exp(L_last) h + sum_s exp(L_last - L_s) dt_s x_s B_s^T

Beyond a document's end dt is zero, which leaves L as it is and makes every term zero; others are finite there.
Everything is fp32 but L; addcmul rounds a sum and its product once, for every shape. In the shapes n counts chunks of
one group of j heads each, and c = tiles.CHUNK.
"""

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import softplus
from megatron_rlzero.kernels.mamba.buffers import Buffers
from megatron_rlzero.kernels.product.reference import batched, batched_add

#: Its exponential is below tiles.FAINT and still far above the denormal numbers.
FAINTEST = log(tiles.FAINT) - 1


def check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, lengths: list[int] | None
) -> None:
    """Shapes and dtypes that the operators rely on; ``lengths`` only where the host knows them."""
    tokens, heads, P = x.shape
    groups, N = B.shape[1:]
    if dt.shape != (tokens, heads) or not A.shape == D.shape == dt_bias.shape == (heads,):
        shapes = ", ".join(str(tuple(t.shape)) for t in (dt, A, D, dt_bias))
        raise ValueError(f"x {tuple(x.shape)} with dt, A, D and dt_bias {shapes}; expected are [tokens, H] and [H]")
    if C.shape != B.shape or len(B) != tokens or heads % groups:
        raise ValueError(
            f"B {tuple(B.shape)} and C {tuple(C.shape)} for x {tuple(x.shape)}; expected is [tokens, G, N] for both, "
            "and a G that divides the heads"
        )
    if P % tiles.WIDTH or N % tiles.WIDTH:
        raise ValueError(
            f"head dimension {P} and state size {N}: both have to be multiples of {tiles.WIDTH}, since at others the "
            "bits of the library's batched products depend on the batch"
        )
    if not A.dtype == D.dtype == dt_bias.dtype == torch.float32:
        raise TypeError(
            f"A {A.dtype}, D {D.dtype}, dt_bias {dt_bias.dtype}; expected is fp32, to which callers cast what a model "
            "keeps in another dtype"
        )
    if lengths is not None and (sum(lengths) != tokens or min(lengths, default=0) < 1):
        raise ValueError(f"lengths {lengths} for {tokens} rows of x; expected are positive ones that sum to the rows")


def time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """[..., h]: softplus(dt + bias) within ``limit``, from ``dt`` [..., h] of any dtype."""
    return softplus(dt.float() + dt_bias).clamp_(*limit)


def decays(steps: Tensor, A: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """dt [..., c, j], which is ``steps`` with zeros for the padding [..., c, 1], and L, float64 [..., c, j].

    L is added from token 0 on. Differences of long sums would lose in fp32 what the gradients of A and dt are made of.
    ``A``: [..., 1, j].
    """
    dt = steps.masked_fill(padding, 0)
    return dt, (dt * A.double()).cumsum(-2)


def decay(x: Tensor) -> Tensor:
    """exp(x) in fp32, zero where it is not above tiles.FAINT; an fp32 x is overwritten.

    What is far below is raised to where the exponential is still zero here: the library is slow at denormal results.
    """
    x = x.float().clamp_(min=FAINTEST).exp_()
    return torch.hardshrink(x, tiles.FAINT, out=x)


def to_end(L: Tensor) -> Tensor:
    """exp(L_last - L_s), [n, c, j]."""
    return decay(L[:, -1:] - L)


def over_chunk(L: Tensor, P: int) -> Tensor:
    """exp(L_last), [n, j P, 1]."""
    return decay(L[:, -1])[..., None, None].expand(-1, -1, P, 1).flatten(1, 2)


@lru_cache(maxsize=8)
def later(c: int, value: float, device: torch.device) -> Tensor:
    """[c, c] with ``value`` above the diagonal, where s > t, and zero elsewhere."""
    return torch.full((c, c), value, device=device).triu_(1)


def between(L: Tensor, held: Buffers) -> Tensor:
    """exp(L_t - L_s), [n, j, c, c]; 0 for s > t, set before the exponential, which might overflow there."""
    L = L.transpose(1, 2).contiguous()
    shape = (*L.shape, L.shape[-1])
    difference = held("difference", *shape, dtype=torch.float64)
    torch.sub(L[..., :, None], L[..., None, :], out=difference)
    return decay(held("between", *shape).copy_(difference).add_(later(tiles.CHUNK, float("-inf"), L.device)))


def by_source(dt: Tensor) -> Tensor:
    """[n, c, j] -> [n, j, 1, c]: a factor of the columns of what is between tokens."""
    return dt.transpose(1, 2).contiguous()[:, :, None]


def by_head(x: Tensor, out: Tensor, factor: Tensor | None = None) -> Tensor:
    """x [..., c, j, P], times ``factor`` [..., c, j] if given, in ``out`` [..., j, c, P]."""
    x = x.transpose(-2, -3)
    return out.copy_(x) if factor is None else torch.mul(x, factor.transpose(-1, -2)[..., None], out=out)


def first(n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The first n rows of each; slicing is not free where the tensors are small."""
    return tensors if len(tensors[0]) == n else tuple(t[:n] for t in tensors)


def move(state: Tensor, kept: Tensor, x: Tensor, B: Tensor, out: Tensor) -> None:
    """out = kept state + sum_s x_s B_s^T.

    Args:
        state, out: [n, j P, N], which may be one tensor.
        kept: [n, j P, 1].
        x: [n, j P, c], weighted.
        B: [n, c, N].
    """
    batched_add(torch.mul(state, kept, out=out), x, B)


def scores(C: Tensor, B: Tensor) -> Tensor:
    """C_t . B_s, [n, rows, c], of C [n, rows, N] and B [n, c, N]."""
    return batched(C, B.transpose(1, 2))


def outputs(x: Tensor, mixed: Tensor, read: Tensor, decay: Tensor, out: Tensor) -> Tensor:
    """y of some rows without the skip connection, [n, rows, j, P].

    Args:
        x: dt_s x_s, [n, j, c, P].
        mixed: exp(L_t - L_s) (C_t . B_s), [n, j, rows, c].
        read: h C_t, [n, rows, j P]; y is written there.
        decay: exp(L_t), [n, rows or 1, j].
        out: [n, j, rows, P], overwritten.
    """
    read = read.unflatten(2, (x.shape[1], -1))
    return torch.addcmul(product(mixed, x, out).transpose(1, 2), read, decay[..., None], out=read)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Product of the last two dimensions, for every chunk and head, in the contiguous ``out``."""
    batched(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))
    return out
