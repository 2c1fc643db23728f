"""Advantage estimators by name: pure functions of the rewards of an update and the group of each response."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Estimator = Callable[[NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]


def _group_sum(values: NDArray[np.float64], groups: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
    """(sum over the group, size of the group), for each response; ValueError for a group of one."""
    names, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError(
            f"group {names[sizes < 2][0]} has one response; set loop.samples_per_prompt above 1 or "
            "loop.advantage to batch_mean"
        )
    return np.bincount(index, weights=values)[index], sizes[index]


def _divide(centred: NDArray[np.float64], std: NDArray[np.float64]) -> NDArray[np.float64]:
    """centred / std, and 0 where std is 0: all rewards are alike there, centred is 0 up to rounding."""
    return np.divide(centred, std, out=np.zeros_like(centred), where=std > 0)


def batch_mean(rewards: NDArray, groups: NDArray) -> NDArray:
    """A_i = R_i - mean_j R_j over the whole update.

    Source: the default of REINFORCE Zero (Hu et al., 2026); REINFORCE with a batch-mean baseline.
    """
    return rewards - rewards.mean() if len(rewards) else rewards


def rloo(rewards: NDArray, groups: NDArray) -> NDArray:
    """A_i = R_i - (1/(n-1)) sum_{j != i} R_j over the n responses of i's group.

    Source: leave-one-out baseline, Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740.
    """
    total, size = _group_sum(rewards, groups)
    return rewards - (total - rewards) / (size - 1)


def grpo(rewards: NDArray, groups: NDArray) -> NDArray:
    """A_i = (R_i - mean_g) / std_g, g being i's group and std the population's; 0 where a group's rewards are equal.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, outcome supervision. No epsilon in the denominator.
    """
    _, size = _group_sum(rewards, groups)
    centred = dr_grpo(rewards, groups)
    equal = _equal_rewards(rewards, groups)
    std = np.sqrt(_group_sum(centred**2, groups)[0] / size)
    return _divide(centred, np.where(equal, 0.0, std))


def dr_grpo(rewards: NDArray, groups: NDArray) -> NDArray:
    """A_i = R_i - mean_g, g being i's group.

    Source: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783.
    """
    total, size = _group_sum(rewards, groups)
    return rewards - total / size


def reinforce_pp_baseline(rewards: NDArray, groups: NDArray) -> NDArray:
    """D_i = R_i - mean_g, then A_i = (D_i - mean_j D_j) / std_j D_j over the update; 0 where every group is equal.

    Source: Hu et al. 2025 (REINFORCE++, the variant with a group baseline), arXiv:2501.03262. Population std.
    """
    centred = dr_grpo(rewards, groups)
    std = 0.0 if len(centred) == 0 or _equal_rewards(rewards, groups).all() else centred.std()
    return _divide(batch_mean(centred, groups), np.full_like(centred, std))


def none(rewards: NDArray, groups: NDArray) -> NDArray:
    """A_i = R_i. Source: Williams 1992, REINFORCE without a baseline."""
    return rewards.copy()


def _equal_rewards(rewards: NDArray, groups: NDArray) -> NDArray[np.bool_]:
    """For each response, whether all rewards of its group are the same number; exact, unlike a zero variance."""
    _, first, index = np.unique(groups, return_index=True, return_inverse=True)
    differs = np.bincount(index, weights=rewards != rewards[first][index])
    return differs[index] == 0


ADVANTAGES: dict[str, Estimator] = {
    estimator.__name__: estimator for estimator in (batch_mean, rloo, grpo, dr_grpo, reinforce_pp_baseline, none)
}
#: estimators that compare the responses to one prompt
GROUPED = ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline")


def compute(name: str, rewards: NDArray, groups: NDArray) -> NDArray[np.float32]:
    """Advantages of the B responses of an update by the estimator ``name``; computed in float64.

    Args:
        rewards: float32 [B].
        groups: integers [B], equal for the responses to one prompt.

    Returns:
        float32 [B].

    Raises:
        ValueError: unknown name, shapes that differ, a reward that is not finite, or a group of one response
            where the estimator compares the responses of a group.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"loop.advantage = {name}: unknown; one of {', '.join(ADVANTAGES)}")
    rewards, groups = np.asarray(rewards, dtype=np.float64), np.asarray(groups, dtype=np.int64)
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards {rewards.shape} and groups {groups.shape}: both need shape [B]")
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(f"reward {row} is {rewards[row]}; the environment has to give a finite reward")
    return ADVANTAGES[name](rewards, groups).astype(np.float32)
