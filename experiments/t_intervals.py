"""The mean over seeds or tasks with its t-interval: what the studies beside this file share."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from semdiag.measuring.findings.resampling import Interval

UNKNOWN = Interval(math.nan, math.nan, math.nan)


def t_interval(values: Sequence[float] | NDArray[np.float64]) -> Interval:
    """Mean and its 95% t-interval; no interval of a single value.

    Example:
        >>> found = t_interval([1.0, 2.0, 3.0])
        >>> found.estimate, round(found.high - found.estimate, 3)
        (2.0, 2.484)
    """
    mean, n = float(np.mean(values)), len(values)
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Interval(mean, mean - half, mean + half)
