"""Intervals by resampling whole sequences: the queries of one sequence are dependent."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray


@dataclass(frozen=True)
class Interval:
    """An estimate with the range that holds it with the given confidence."""

    estimate: float
    low: float
    high: float


def ratio_interval(
    numerator: pd.DataFrame,
    denominator: pd.DataFrame,
    quantity: str = "dispersion",
    percentile: float = 50,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Ratio of one percentile of a quantity in two sets of queries, with a percentile-bootstrap interval.

    Whole sequences are drawn with replacement. Where both sets come from the same samples, both sides of the
    ratio use the same draw, so what the sequences have in common cancels.

    Args:
        numerator: queries with the columns sample and ``quantity``; the same number for every sample.
        denominator: likewise.
        quantity: the column.
        percentile: which percentile of the queries is compared.
        resamples: bootstrap draws.
        confidence: of the interval, in (0, 1).
        seed: of the draws.

    Returns:
        Estimate and interval; NaN where a side has no finite value, or the denominator is 0.

    Raises:
        ValueError: if a side has no samples.
    """
    above, below = _Sequences(numerator, quantity), _Sequences(denominator, quantity)
    paired = above.count == below.count
    rng = np.random.default_rng(seed)

    def draw(sequences: _Sequences) -> NDArray[np.int64]:
        return np.bincount(rng.integers(sequences.count, size=sequences.count), minlength=sequences.count)

    ratios = np.empty(resamples)
    for i in range(resamples):
        times = draw(above)
        ratios[i] = _ratio(above, times, below, times if paired else draw(below), percentile)
    once = np.ones(above.count, np.int64), np.ones(below.count, np.int64)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(_ratio(above, once[0], below, once[1], percentile), float(low), float(high))


class _Sequences:
    """The finite values of a quantity, sorted once, and the sequence each belongs to."""

    def __init__(self, rows: pd.DataFrame, quantity: str) -> None:
        if rows.empty:
            raise ValueError("There are no queries to resample.")
        samples, owner = np.unique(rows["sample"], return_inverse=True)
        values = rows[quantity].to_numpy(np.float64)
        order = np.argsort(values, kind="stable")
        order = order[np.isfinite(values[order])]
        self.count, self.values, self.owner = len(samples), values[order], owner[order]

    def percentile(self, times: NDArray[np.int64], percentile: float) -> float:
        """Percentile of the values when sequence s is taken ``times[s]`` times, linear interpolation."""
        ends = np.cumsum(times[self.owner])  # where each value's copies end among all values
        if not ends.size or not ends[-1]:
            return float("nan")
        place = (ends[-1] - 1) * percentile / 100
        below, above = self.values[np.searchsorted(ends, [np.floor(place), np.ceil(place)], side="right")]
        return float(below + (above - below) * (place % 1))


def _ratio(
    above: _Sequences, times: NDArray[np.int64], below: _Sequences, other: NDArray[np.int64], percentile: float
) -> float:
    denominator = below.percentile(other, percentile)
    return above.percentile(times, percentile) / denominator if denominator else float("nan")
