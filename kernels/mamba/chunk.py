"""The one arithmetic of a chunk of the Mamba-2 scan: products of fixed shape over the tokens of a chunk.

With L_t the sum of A dt up to token t of its chunk, and h the state before the chunk (Dao and Gu, Mamba-2, 2024):

    y_t = exp(L_t) h C_t + sum_{s <= t} exp(L_t - L_s) dt_s (C_t . B_s) x_s
    h'  = exp(L_last) h + sum_s exp(L_last - L_s) dt_s x_s B_s^T

Beyond a document's end dt is zero, which leaves L as it is and makes every term zero; others are finite there.
Everything is fp32 but L; addcmul rounds a sum and its product once, for every shape. In the shapes n counts chunks of
one group of j heads each, and c = tiles.CHUNK.
"""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from megatron_rlzero.kernels import tiles
from megatron_rlzero.kernels.activation import softplus


def check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, lengths: list[int]
) -> None:
    """Shapes and dtypes that the operators rely on."""
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
    if sum(lengths) != tokens or min(lengths, default=0) < 1:
        raise ValueError(f"lengths {lengths} for {tokens} rows of x; expected are positive ones that sum to the rows")


def time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float]) -> Tensor:
    """[..., h]: softplus(dt + bias) within ``limit``, from ``dt`` [..., h] of any dtype."""
    return softplus(dt.float() + dt_bias).clamp_(*limit)


def wide(x: Tensor) -> Tensor:
    """fp32 and contiguous."""
    return x.to(torch.float32).contiguous()


def decays(steps: Tensor, A: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """dt [n, c, j], which is ``steps`` with zeros for the padding [n, c, 1], and L, float64 [n, c, j].

    L is added from token 0 on. Differences of long sums would lose in fp32 what the gradients of A and dt are made of.
    """
    dt = steps.masked_fill(padding, 0)
    return dt, (dt * A.double()).cumsum(1)


def decay(x: Tensor) -> Tensor:
    """exp(x) in fp32, zero where it is not above tiles.FAINT."""
    return hardshrink(x.float().exp(), tiles.FAINT)


def to_end(L: Tensor) -> Tensor:
    """exp(L_last - L_s), [n, c, j]."""
    return decay(L[:, -1:] - L)


def over_chunk(L: Tensor) -> Tensor:
    """exp(L_last), [n, j, 1, 1]."""
    return decay(L[:, -1, :, None, None])


@lru_cache(maxsize=8)
def later(c: int, value: float, device: torch.device) -> Tensor:
    """[c, c] with ``value`` above the diagonal, where s > t, and zero elsewhere."""
    return torch.full((c, c), value, device=device).triu_(1)


def between(L: Tensor) -> Tensor:
    """exp(L_t - L_s), [n, j, c, c]; 0 for s > t, set before the exponential, which might overflow there."""
    L = L.transpose(1, 2).contiguous()
    difference = (L[..., :, None] - L[..., None, :]).float()
    return decay(difference.add_(later(tiles.CHUNK, float("-inf"), L.device)))


def by_source(dt: Tensor) -> Tensor:
    """[n, c, j] -> [n, j, 1, c]: a factor of the columns of what is between tokens."""
    return dt.transpose(1, 2).contiguous()[:, :, None]


def states(x: Tensor, B: Tensor, weights: Tensor) -> Tensor:
    """[n, j, P, N]: sum_s weights_s x_s B_s^T over x [n, c, j, P], B [n, c, N] and weights [n, c, j]."""
    weighted = (x * weights[..., None]).flatten(2)
    return torch.bmm(weighted.transpose(1, 2), B).unflatten(1, x.shape[2:])


def move(state: Tensor, new: Tensor, kept: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """States before every chunk, like ``new`` [n, j, P, N], and those behind the last step.

    Args:
        state: [documents, j, P, N], before the first step.
        new: what each chunk adds to the state; kept: [n, j, 1, 1], by what it multiplies it.
        counts: chunks of each step, one per document; a document that has ended comes behind those that go on.
    """
    entering = torch.empty_like(new)
    parts = list(zip(entering.split(counts), new.split(counts), kept.split(counts), strict=True))
    parts[0][0].copy_(state[: counts[0]])
    for (before, added, factor), (after, *_) in pairwise(parts):
        n = len(after)
        torch.addcmul(added[:n], before[:n], factor[:n], out=after)
    before, added, factor = parts[-1]
    return entering, torch.addcmul(added, before, factor)


def scores(C: Tensor, B: Tensor) -> Tensor:
    """C_t . B_s, [n, rows, c], of C [n, rows, N] and B [n, c, N]."""
    return torch.bmm(C, B.transpose(1, 2))


def outputs(x: Tensor, C: Tensor, mixed: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """y of some rows without the skip connection, [n, rows, j, P].

    Args:
        x: [n, j, c, P].
        C: [n, rows, N].
        mixed: exp(L_t - L_s) dt_s (C_t . B_s), [n, j, rows, c].
        decay: exp(L_t), [n, rows or 1, j].
        state: [n, j, P, N].
    """
    read = torch.bmm(C, state.flatten(1, 2).transpose(1, 2)).unflatten(2, state.shape[1:3])
    return torch.addcmul(product(mixed, x).transpose(1, 2), read, decay[..., None], out=read)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Product of the last two dimensions, for every chunk and head."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
