"""When a run collapses, and whether two groups of runs differ in it: the censored log-rank test.

Collapse, laid down before the runs: the held-out pass@1 is below HALF of its running maximum at PATIENCE evaluations in
a row, and its time is the first of them; or loss or gradient norm of an update is not finite. A run that came to its
end without is censored there. One that recovers later has collapsed all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import erfc, sqrt

import numpy as np
from numpy.typing import NDArray

HALF, PATIENCE = 0.5, 3

#: (times, whether it collapsed then) of a group of runs
Group = tuple[NDArray[np.float64], NDArray[np.bool_]]


def collapse(held_out: NDArray, every: int, finite: NDArray[np.bool_]) -> tuple[int, bool]:
    """(update of the collapse or of the end, whether it collapsed) of one run.

    ``held_out`` [evaluations] begins before the first update, one each ``every`` updates; ``finite`` [updates].
    """
    low = held_out < HALF * np.maximum.accumulate(held_out)
    runs = np.convolve(low, np.ones(PATIENCE), mode="valid") == PATIENCE
    times = [every * int(np.argmax(runs))] if runs.any() else []
    times += [int(np.argmax(~finite))] if not finite.all() else []
    return (min(times), True) if times else (len(finite), False)


def log_rank(strata: Iterable[tuple[Group, Group]]) -> tuple[float, float]:
    """(chi-square of one degree of freedom, p) that both groups of every stratum have the same hazard.

    At each time of a collapse, O - E and the hypergeometric variance of the first group's collapses; both are summed
    over times and strata (Mantel 1966; Peto and Peto 1972). With nothing to compare it is (0, 1).
    """
    excess = variance = 0.0
    for (times, events), (other_times, other_events) in strata:
        for time in np.unique(np.concatenate([times[events], other_times[other_events]])):
            n1, n = int((times >= time).sum()), int((times >= time).sum() + (other_times >= time).sum())
            d1 = int((events & (times == time)).sum())
            d = d1 + int((other_events & (other_times == time)).sum())
            excess += d1 - d * n1 / n
            variance += d * n1 * (n - n1) * (n - d) / (n * n * (n - 1)) if n > 1 else 0.0
    chi2 = excess**2 / variance if variance else 0.0
    return chi2, erfc(sqrt(chi2 / 2))
