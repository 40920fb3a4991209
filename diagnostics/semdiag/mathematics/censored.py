"""Times to learn: medians of runs of which some were stopped early; predicted classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import scipy
from torch import Tensor


@dataclass(frozen=True)
class MedianInterval:
    """The median of a few draws, each a number or a range."""

    count: int  # number of draws
    low: float  # median if every draw is at the low end of its range
    high: float  # median if every draw is at the high end of its range; equals ``low`` if all draws are numbers
    interval_low: float  # lower end of a distribution-free interval for the population's median; NaN for one draw
    interval_high: float  # upper end of that interval
    coverage: float  # confidence of the interval; 0 for one draw


def median_interval(lows: Sequence[float], highs: Sequence[float], confidence: float = 0.95) -> MedianInterval:
    """Return the median of draws that may be censored, with an interval from order statistics.

    The r-th smallest and the r-th largest of n draws enclose the median with probability 1 − 2 P(Binomial(n, ½) <
    r), whatever the distribution: 50% for n = 2, 94% for 5 with r = 1. The largest r that reaches the confidence
    is taken; if none does, r = 1, and the coverage says so. No draw, and an empty range, are a ValueError.

    Source: David and Nagaraja, Order Statistics, section 7.1. Deviation: ends of ranges instead of draws.

    Example:
        >>> found = median_interval([2.0, 3.0, 5.0], [2.0, 3.0, float("inf")])
        >>> found.low, found.high, found.interval_low, found.interval_high, found.coverage
        (3.0, 3.0, 2.0, inf, 0.75)
    """
    n = len(lows)
    if n == 0 or n != len(highs):
        raise ValueError(f"Every draw needs a low and a high value, and there must be one. Got {n}, {len(highs)}.")
    if any(not low <= high for low, high in zip(lows, highs, strict=True)):
        raise ValueError("The low value of a draw must not be above its high value.")
    below = sorted(lows)
    above = sorted(highs)
    ranks = [r for r in range(1, n // 2 + 1) if _coverage(n, r) >= confidence]
    rank = max(ranks, default=1)
    many = n > 1
    return MedianInterval(
        count=n,
        low=median(below),
        high=median(above),
        interval_low=below[rank - 1] if many else math.nan,
        interval_high=above[n - rank] if many else math.nan,
        coverage=_coverage(n, rank) if many else 0.0,
    )


def kaplan_meier_median(durations: Sequence[float], arrived: Sequence[bool]) -> float:
    """Return the time by which half of the runs have arrived, if some were stopped early.

    The smallest time at which the estimated share of arrivals reaches ½; +inf if never. No run is a ValueError.

    Source: Kaplan and Meier 1958, through :func:`scipy.stats.ecdf`. Deviation: none.

    Example:
        >>> kaplan_meier_median([3, 5, 100], [True, True, False])
        5.0
    """
    if not len(durations):
        raise ValueError("There is no median without runs.")
    if not any(arrived):
        return math.inf
    times = np.asarray(durations, dtype=float)
    censored = ~np.asarray(arrived, dtype=bool)
    share = scipy.stats.ecdf(scipy.stats.CensoredData.right_censored(times, censored)).cdf
    there = share.quantiles[share.probabilities >= 0.5 - 1e-12]
    return float(there[0]) if len(there) else math.inf


def _coverage(n: int, rank: int) -> float:
    return float(max(0.0, 1 - 2 * scipy.stats.binom.cdf(rank - 1, n, 0.5)))


NO_CLASS = -1  # predicted class where a logit is NaN: never right


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the int64 class of the largest of (…, C) logits, the first of equals; ``NO_CLASS`` if one is NaN."""
    classes = logits.argmax(-1)  # the position of a NaN, if there is one, by which a diverged model would be right
    return classes.masked_fill(logits.gather(-1, classes[..., None])[..., 0].isnan(), NO_CLASS)
