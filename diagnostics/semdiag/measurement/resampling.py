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
    above, below = _by_sample(numerator, quantity), _by_sample(denominator, quantity)
    paired = len(above) == len(below)
    rng = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for i in range(resamples):
        draw = rng.integers(len(above), size=len(above))
        other = draw if paired else rng.integers(len(below), size=len(below))
        ratios[i] = _ratio(above[draw], below[other], percentile)
    tail = 100 * (1 - confidence) / 2
    estimate = _ratio(above, below, percentile)
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Interval(estimate, float(low), float(high))


def _by_sample(rows: pd.DataFrame, quantity: str) -> NDArray[np.float64]:
    """Table (samples, queries per sample), padded with NaN where samples differ in length."""
    if rows.empty:
        raise ValueError("There are no queries to resample.")
    place = rows.groupby("sample").cumcount()
    samples, row = np.unique(rows["sample"], return_inverse=True)
    table = np.full((len(samples), int(place.max()) + 1), np.nan)
    table[row, place] = rows[quantity]
    table[~np.isfinite(table)] = np.nan
    return table


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64], percentile: float) -> float:
    denominator = _percentile(below, percentile)
    return _percentile(above, percentile) / denominator if denominator else float("nan")


def _percentile(table: NDArray[np.float64], percentile: float) -> float:
    values = table.ravel()
    values = values[~np.isnan(values)]
    return float(np.percentile(values, percentile)) if values.size else float("nan")
