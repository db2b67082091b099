"""What pairs of timed runs say, on a machine whose other guests take its processors for a while now and then.

Such a while makes one run of a pair twice as long and would move a mean for good. The Hodges-Lehmann estimate, the median of all
averages of two ratios, and the interval that belongs to it by Wilcoxon's signed ranks leave single pairs without weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


def middle_of_averages(differences: Sequence[float]) -> float:
    """Return the Hodges-Lehmann estimate of differences, in their unit."""
    return float(np.median(_averages(np.asarray(differences, dtype=np.float64))))


def interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the Hodges-Lehmann estimate of ratios, on their logarithms, and its interval of at least 95 %.

    Fewer than six pairs have no such interval: None.
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    averages = np.sort(_averages(logs))
    middle, left_out = math.exp(float(np.median(averages))), _outside(logs.size)
    if left_out is None:
        return middle, None, None
    return middle, math.exp(averages[left_out]), math.exp(averages[-1 - left_out])


def _averages(values: np.ndarray) -> np.ndarray:
    """Return the averages of all pairs, each value with itself among them."""
    return np.add.outer(values, values)[np.triu_indices(values.size)] / 2


def _outside(pairs: int) -> int | None:
    """Return how many of the sorted averages lie outside the interval at either end; None where all of them are too few."""
    ways = np.ones(1)  # by sum of ranks: subsets of the ranks 1 to `pairs`
    for rank in range(1, pairs + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    below = np.cumsum(ways) / 2.0**pairs
    left_out = int(np.searchsorted(below, (1 - CONFIDENCE) / 2, side="right"))
    return left_out - 1 if left_out else None
