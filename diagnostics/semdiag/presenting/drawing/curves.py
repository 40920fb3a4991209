"""Distribution curves of few points, so that a figure does not grow with the number of queries."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

POINTS = 500


def cumulative_curve(values: ArrayLike, points: int = POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of the cumulative distribution of the finite values above 0, exact at evenly spaced shares."""
    array = np.asarray(values, dtype=np.float64).ravel()
    array = array[np.isfinite(array)]
    if not array.size:
        return np.zeros(0), np.zeros(0)
    shares = np.linspace(0.0, 1.0, min(points, max(array.size, 2)))
    cuts = np.quantile(array, shares)
    return cuts[cuts > 0], shares[cuts > 0]


def exceedance_curve(counts: ArrayLike, points: int = POINTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the share of counts that are at least x, for every x that occurs."""
    array = np.asarray(counts, dtype=np.float64).ravel()
    distinct, repeats = np.unique(array[np.isfinite(array)], return_counts=True)
    if not distinct.size:
        return np.zeros(0), np.zeros(0)
    at_least = repeats[::-1].cumsum()[::-1] / repeats.sum()
    if distinct.size > points:
        chosen = np.unique(np.linspace(0, distinct.size - 1, points).round().astype(int))
        distinct, at_least = distinct[chosen], at_least[chosen]
    return distinct, at_least
