"""Bias, direction and variance of batch gradients from the inner products of group means: pure functions.

Everything is a function of the Gram matrix of the group means m_k, k = 1 .. n, of each arm, and of the mean squared
norms of its batches. Groups are independent, so that products of different groups carry no squared noise:

    U(x, y) = sum_{j != k} <x_j, y_k> / (n (n - 1))        unbiased for <E x, E y>

r is the reference, a an arm, s and a the arms of a pair. Standard errors are those of the jackknife over groups,
sqrt((n - 1) / n sum_k (f_k - mean f)^2), f_k the statistic without group k of any arm.

    bias        ||E a - E r||^2 / ||E r||^2 = U(a - r, a - r) / U(r, r); negative by chance where there is none
    cosine      U(a, r) / sqrt(U(a, a) U(r, r)); may exceed 1 by chance
    variance    V(a) = mean_b ||g_b||^2 - U(a, a), unbiased for E||g - E g||^2, over U(r, r), or over V(r)
    paired      U(s - a, s - a) / U(r, r), which in a pair of equal noise is far more exact
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

#: one-sided 95% of a normal distribution
NORMAL_95 = 1.645

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A statistic and its standard error."""

    value: float
    error: float

    @property
    def root(self) -> float:
        """Of a squared length: the length; 0 where the estimate is negative."""
        return sqrt(max(0.0, self.value))

    @property
    def at_most(self) -> float:
        """Of a squared length: one-sided 95% bound on the length, where the estimate is about normal."""
        return sqrt(max(0.0, self.value) + NORMAL_95 * self.error)

    @property
    def found(self) -> bool:
        """Whether it is above zero at one-sided 95%."""
        return self.value > NORMAL_95 * self.error


@dataclass(frozen=True)
class Groups:
    """What was measured.

    Attributes:
        gram: float64 [arms, groups, arms, groups], inner products of the group means.
        squares: float64 [arms, groups], mean over a group's batches of ||g||^2.
    """

    gram: Floats
    squares: Floats

    def without(self, group: int) -> Groups:
        kept = np.arange(self.gram.shape[1]) != group
        return Groups(self.gram[:, kept][..., kept], self.squares[:, kept])

    def cross(self, x: Floats, y: Floats) -> float:
        """U of two combinations of arms, float64 [arms] coefficients each."""
        products = np.einsum("a,ajbk,b->jk", x, self.gram, y)
        n = len(products)
        return float((products.sum() - np.trace(products)) / (n * (n - 1)))

    def arm(self, index: int) -> Floats:
        """The coefficients of one arm."""
        return np.eye(len(self.gram))[index]

    def distance(self, arm: int, other: int, reference: int) -> float:
        """||E arm - E other||^2 / ||E reference||^2: bias where ``other`` is the reference, paired where not."""
        d, r = self.arm(arm) - self.arm(other), self.arm(reference)
        return self.cross(d, d) / self.cross(r, r)

    def cosine(self, arm: int, reference: int) -> float:
        a, r = self.arm(arm), self.arm(reference)
        return self.cross(a, r) / sqrt(self.cross(a, a) * self.cross(r, r))

    def variance(self, arm: int) -> float:
        """E||g - E g||^2 of one batch."""
        a = self.arm(arm)
        return float(self.squares[arm].mean()) - self.cross(a, a)

    def relative_variance(self, arm: int, reference: int) -> float:
        r = self.arm(reference)
        return self.variance(arm) / self.cross(r, r)


def jackknife(groups: Groups, statistic: Callable[[Groups], float]) -> Estimate:
    """The statistic of all groups, and its standard error."""
    n = groups.gram.shape[1]
    left_out = np.array([statistic(groups.without(k)) for k in range(n)])
    error = sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))
    return Estimate(statistic(groups), error)
