"""Torch's form of top-k routing: fp32 scores, the lowest expert id on ties."""

import torch
from torch import Tensor

#: Added to the sum of the chosen scores before the division; sigmoids may all be zero.
LEAST_TOTAL = 1e-20


def scores(logits: Tensor, sigmoid: bool) -> Tensor:
    """fp32 [tokens, E]; sigmoids from exp, since the library's own depend on the shape."""
    return 1 / (1 + (-logits).exp()) if sigmoid else torch.softmax(logits, dim=-1)


def choose(choice: Tensor, scores: Tensor, k: int, renormalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    """The experts of the ``k`` largest of ``choice`` [tokens, E], in ascending id, and their probabilities."""
    experts = _largest(choice, k).sort(dim=-1).values
    probabilities = scores.gather(1, experts)
    if renormalise:
        probabilities = probabilities / _total(probabilities)
    return probabilities * scaling, experts


def gradient(scores: Tensor, experts: Tensor, grad: Tensor, renormalise: bool, scaling: float, sigmoid: bool) -> Tensor:
    """The gradient of the logits, fp32 [tokens, E], for ``grad`` [tokens, k] of the probabilities."""
    chosen, grad = scores.gather(1, experts), grad * scaling
    if renormalise:
        total = _total(chosen)
        grad = (grad - _added(grad * chosen) / total) / total
    inner = _added(grad * chosen)
    grad = torch.zeros_like(scores).scatter_(1, experts, grad)
    return grad * scores * (1 - scores) if sigmoid else scores * (grad - inner)


def best_groups(choice: Tensor, k: int, groups: int, group_top_k: int) -> Tensor:
    """``choice`` with -inf in all but the ``group_top_k`` best groups of each token; exact, so of every form."""
    tokens, count = choice.shape
    if count % groups or count // groups < 2 or not 0 < group_top_k <= groups or count // groups * group_top_k < k:
        raise ValueError(
            f"top-{k} of {count} experts in the best {group_top_k} of {groups} groups; expected are groups of one "
            "size, two experts at least, which hold k experts together"
        )
    grouped = choice.unflatten(1, (groups, -1))
    best = grouped.sort(dim=-1, descending=True).values
    kept = _largest(best[..., 0] + best[..., 1], group_top_k)
    dropped = torch.ones(tokens, groups, dtype=torch.bool, device=choice.device).scatter_(1, kept, False)
    return grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest of each row, the lowest index first on ties."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]


def _total(chosen: Tensor) -> Tensor:
    return _added(chosen) + LEAST_TOTAL


def _added(x: Tensor) -> Tensor:
    """[tokens, k] -> [tokens, 1], from the first slot on."""
    total = x[:, :1]
    for slot in range(1, x.shape[1]):
        total = total + x[:, slot : slot + 1]
    return total
