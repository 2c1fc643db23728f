"""SwiGLU's activation: silu is built from exp, since the library's silu depends on the shape it is called with."""

from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        x: [..., 2 I], the gate first.

    Returns:
        [..., I], dtype of ``x``; fp32 inside, rounded once.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)
