"""What a difference at an operator usually comes from, in the order in which to look."""

from __future__ import annotations

#: words in the operator's name -> causes; the first entry that fits is taken
CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("router",), "ties decided otherwise, scores in another dtype, bias or groups left out, scaling of the scores"),
    (("expert",), "weights of experts in another order or transposed, routed scaling, order of the sum"),
    (("shared",), "activation, a slice of the shared experts, their sum before or after the routed ones"),
    (("latent",), "order of the projections around the experts"),
    (("convolution", "scan", "mixer"), "gate before or after the norm, bound of the time step, softplus, A, D, groups"),
    (("q_layernorm", "k_layernorm", "query norm", "key norm"), "epsilon, norm before or after the rotary embedding"),
    (("attention", "linear_proj", "output projection"), "rotary base, scaling or layout, scale, order of the KV heads"),
    (
        ("norm and query", "norm and projection", "linear_qkv"),
        "epsilon, rounding of the residual, order of the columns",
    ),
    (("residual", "norm"), "epsilon, the dtype in which the residual is added and rounded"),
    (("MLP", "linear_fc"), "activation, order of gate and up, number of K-slices"),
)
UNKNOWN = "the operators that both sides call there (see the map), their arguments, the weights that they got"


def causes(operator: str) -> str:
    """The likely causes of a difference whose first trace is at ``operator``."""
    return next((text for words, text in CAUSES if any(word in operator for word in words)), UNKNOWN)
