"""Intervals over whole sequences, because the queries of one sequence are dependent: bootstrap and jackknife."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy
from numpy.typing import NDArray

from semdiag.mathematics.sampled_intervals import ratio_ends
from semdiag.measuring.words import FEWEST

_ROUNDING = 1e-12  # relative rounding of a quotient of sums


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; NaN if there is none."""

    estimate: float
    low: float
    high: float

    def if_varied(self) -> "Interval":
        """Return the interval without ends if they are equal to rounding: equal sequences show no variation."""
        varied = self.high - self.low > _ROUNDING * max(abs(self.low), abs(self.high))
        return self if varied else Interval(self.estimate, math.nan, math.nan)

    def columns(self, name: str) -> dict[str, float]:
        """Return the estimate as ``name``, and the ends as ``name_low`` and ``name_high``."""
        return {name: self.estimate, f"{name}_low": self.low, f"{name}_high": self.high}


def tail_levels(units: int) -> tuple[float, float]:
    """Return the percentiles of the resampled values that bound an interval; it is wider for few units."""
    if units < FEWEST:
        raise ValueError(f"An interval needs at least {FEWEST} units. Got {units}.")
    reach = math.sqrt(units / (units - 1)) * float(scipy.stats.t.ppf(0.975, units - 1))
    tail = 100 * float(scipy.stats.norm.sf(reach))
    return tail, 100 - tail


def interval_ends(resampled: NDArray[np.float64], units: int) -> tuple[float, float]:
    """Return the ends of an interval: resampled values at :func:`tail_levels`."""
    if units < FEWEST or not resampled.size:
        return math.nan, math.nan
    low, high = np.percentile(resampled, tail_levels(units))
    return float(low), float(high)


def ratio_interval(
    numerator: pd.DataFrame,
    denominator: pd.DataFrame,
    quantity: str = "dispersion",
    percentile: float = 50,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Return the ratio of one percentile of a quantity in two sets of queries, with a bootstrap interval."""
    top = _Sequences(numerator, quantity)
    bottom = _Sequences(denominator, quantity)
    paired = top.count == bottom.count
    rng = np.random.default_rng(seed)

    def draw(count: int) -> NDArray[np.int64]:
        return np.bincount(rng.integers(count, size=count), minlength=count)

    draws = [(np.ones(top.count, np.int64), np.ones(bottom.count, np.int64))]  # the first is the estimate
    for _ in range(resamples):
        times = draw(top.count)
        draws.append((times, times if paired else draw(bottom.count)))
    tops = top.percentiles([times for times, _ in draws], percentile)
    bottoms = bottom.percentiles([times for _, times in draws], percentile)
    ratios = np.divide(tops, bottoms, out=np.full(len(tops), np.nan), where=bottoms != 0)
    return Interval(float(ratios[0]), *interval_ends(ratios[1:], min(top.count, bottom.count)))


_AT_ONCE = 2**21  # numbers held by one step of resampling


class _Sequences:
    """Finite values of a quantity, sorted once, with the sequence of each; in chunks of equal size."""

    def __init__(self, rows: pd.DataFrame, quantity: str) -> None:
        if rows.empty:
            raise ValueError("There are no queries to resample.")
        samples, owner = np.unique(rows["sample"], return_inverse=True)
        values = rows[quantity].to_numpy(np.float64)
        order = np.argsort(values, kind="stable")
        order = order[np.isfinite(values[order])]
        self.count = len(samples)
        chunks = max(1, min(math.isqrt(order.size), _AT_ONCE // self.count))
        size = max(1, -(-order.size // chunks))
        spare = chunks * size - order.size  # belongs to a sequence that is never drawn
        self.values = np.append(values[order], np.zeros(spare)).reshape(chunks, size)
        self.owner = np.append(owner[order], np.full(spare, self.count)).reshape(chunks, size)
        places = self.owner * chunks + np.arange(chunks)[:, None]
        held = np.bincount(places.ravel(), minlength=(self.count + 1) * chunks)
        # values of each sequence in each chunk
        self.held = held.reshape(self.count + 1, chunks).astype(np.float64)

    def percentiles(self, draws: Sequence[NDArray[np.int64]], percentile: float) -> NDArray[np.float64]:
        """Return the linearly interpolated percentile for each draw, which takes sequence s ``draw[s]`` times."""
        step = max(1, _AT_ONCE // (self.count + sum(self.values.shape)))
        parts = (np.array(draws[start : start + step]) for start in range(0, len(draws), step))
        return np.concatenate([self._percentiles(times, percentile) for times in parts])

    def _percentiles(self, times: NDArray[np.int64], percentile: float) -> NDArray[np.float64]:
        times = np.pad(times, [(0, 0), (0, 1)])
        ends = np.cumsum(times @ self.held, axis=1)  # ends of each chunk's copies, among all values
        place = (ends[:, -1] - 1) * percentile / 100
        values = []
        for rank in (np.floor(place), np.ceil(place)):
            chunk = np.minimum((ends <= rank[:, None]).sum(axis=1), ends.shape[1] - 1)
            copies = np.cumsum(np.take_along_axis(times, self.owner[chunk], axis=1), axis=1)
            copies_before = np.where(chunk > 0, ends[np.arange(len(ends)), chunk - 1], 0)
            inside = (copies <= (rank - copies_before)[:, None]).sum(axis=1)
            values.append(self.values[chunk, np.minimum(inside, self.values.shape[1] - 1)])
        below, above = values
        return np.where(ends[:, -1] > 0, below + (above - below) * (place % 1), np.nan)


def mean_interval(rows: pd.DataFrame, quantity: str, *, share: bool = True) -> Interval:
    """Return the mean of a quantity over rows, as :func:`sum_ratio_interval` of their samples."""
    values = rows[quantity].to_numpy(np.float64)
    finite = np.isfinite(values)
    owner = np.unique(rows["sample"].to_numpy()[finite], return_inverse=True)[1]
    sums, counts = (np.bincount(owner, each).astype(np.float64) for each in (values[finite], finite[finite]))
    return sum_ratio_interval(sums, counts, share=share)


def sum_ratio_interval(sums: NDArray[np.float64], counts: NDArray[np.float64], *, share: bool = False) -> Interval:
    """Return Σ sums / Σ counts over sequences, such as the loss per token, with an interval."""
    sums = sums[counts > 0]
    counts = counts[counts > 0]
    estimate = float(sums.sum() / counts.sum()) if len(sums) else math.nan
    if len(sums) < FEWEST or not np.isfinite(sums).all():
        return Interval(estimate, math.nan, math.nan)
    low, high = ratio_ends(sums, counts)
    return Interval(estimate, max(low, 0.0), min(high, 1.0)) if share else Interval(estimate, low, high)


def rank_correlation_interval(
    rows: pd.DataFrame, first: str, second: str, resamples: int = 200, seed: int = 0
) -> Interval:
    """Return Spearman's rank correlation of two quantities, with a bootstrap interval."""
    if rows.empty:
        return Interval(math.nan, math.nan, math.nan)
    samples, owner = np.unique(rows["sample"], return_inverse=True)
    ties = [np.unique(rows[name].to_numpy(np.float64), return_inverse=True)[1] for name in (first, second)]
    rng = np.random.default_rng(seed)
    once = np.ones(len(samples), np.int64)
    draws = rng.multinomial(len(samples), np.full(len(samples), 1 / len(samples)), size=resamples)
    correlations = np.array([_rank_correlation(ties, times[owner]) for times in (once, *draws)])
    resampled = correlations[1:][np.isfinite(correlations[1:])]
    return Interval(float(correlations[0]), *interval_ends(resampled, len(samples)))


def _rank_correlation(ties: list[NDArray[np.int64]], weights: NDArray[np.int64]) -> float:
    """Return the correlation of mean ranks, with row i taken ``weights[i]`` times; ``ties`` label equal values."""
    held = [np.bincount(numbers, weights) for numbers in ties]
    # They differ from the usual ranks by a constant, which cancels.
    ranks = [(np.cumsum(each) - each / 2)[numbers] for each, numbers in zip(held, ties, strict=True)]
    x, y = (rank - (weights * rank).sum() / weights.sum() for rank in ranks)
    weighted = weights * x
    spread = np.sqrt((weighted * x).sum() * (weights * y * y).sum())
    return float((weighted * y).sum() / spread) if spread > 0 else math.nan
