"""Confidence intervals by resampling: queries, or whole classes of them, are drawn again and again with replacement."""

import numpy as np
from numpy.typing import NDArray

from rankgrad._checks import check_count


def bootstrap_intervals(
    values: NDArray[np.float64], units: NDArray[np.int64], *, level: float, samples: int, seed: int
) -> NDArray[np.float64]:
    """[M, 2] percentile intervals of the column means of `values` [Q, M], NaN entries left out of their column's mean.

    Rows of one unit are drawn together, so rows that are not independent of each other belong to one unit.
    """
    check_count(samples, name="samples", caller="Result.intervals")
    check_count(seed, name="seed", caller="Result.intervals", least=0)
    if not 0 < level < 1:
        raise ValueError(f"Result.intervals: level must be above 0 and below 1, got {level!r}")
    unit = np.unique(units, return_inverse=True)[1]
    count = int(unit.max()) + 1
    counted = ~np.isnan(values)
    weights = np.concatenate((np.where(counted, values, 0.0), counted), axis=1)
    totals = np.zeros((count, weights.shape[1]))
    np.add.at(totals, unit, weights)
    rng = np.random.default_rng(seed)
    # one sample after another: all draws at once would be samples x queries
    drawn = np.stack([np.bincount(rng.integers(count, size=count), minlength=count) @ totals for _ in range(samples)])
    sums, sizes = np.split(drawn, 2, axis=1)
    means = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.nan)
    tail = 50 * (1 - level)
    bounds = np.full((values.shape[1], 2), np.nan)
    some = (sizes > 0).any(axis=0)  # numpy warns of a column of nothing
    bounds[some] = np.nanpercentile(means[:, some], (tail, 100 - tail), axis=0).T
    return bounds
