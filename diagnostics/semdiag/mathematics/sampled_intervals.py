"""Means, ratios and percentiles from drawn queries, with intervals for these sequences and for ones like these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

PER_STRATUM = 2  # fewest draws that show the spread within a stratum


def draw_queries(queries: int, heads: int, count: int, of: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the fraction count / of of a sequence's n queries for every head: positions (heads, most).

    m = ⌊n · count / of⌋ or one more, at random, so that m is n · count / of on average. The n positions form a
    circle, which is rotated at random and cut into m/2 strata of neighbours; two queries are drawn from each (one
    from the last, if m is odd). No query is drawn twice, and every query has probability count / of. Columns 2s
    and 2s + 1 belong to stratum s; -1 (at the end) if a head has one fewer; at least one column.

    Source: stratified sampling; Cochran 1977, Sampling Techniques, §5.3. Deviation: the random rotation.

    Example:
        >>> draw_queries(8, 2, 4, 8, np.random.default_rng(0)).tolist()
        [[2, 3, 1, 0], [7, 6, 0, 3]]
    """
    fewest, rest = divmod(queries * count, of)
    chance = rng.random((heads, fewest + 3))
    number = fewest + (chance[:, :1] * of < rest)
    column = np.arange(fewest + 1)
    first = column // PER_STRATUM * PER_STRATUM
    last = column // PER_STRATUM * PER_STRATUM + PER_STRATUM
    start, stop = (np.minimum(end, number) * queries // np.maximum(number, 1) for end in (first, last))
    second = column % PER_STRATUM
    within = np.floor(chance[:, 2:] * (stop - start - second)).astype(np.int64)
    before = np.roll(within, 1, axis=1)  # the second draw skips what the first one took
    within += second * (within >= before)
    turned = (np.floor(chance[:, 1:2] * queries).astype(np.int64) + start + within) % max(queries, 1)
    return np.where(column < number, turned, -1)[:, : max(1, int(number.max(initial=0)))]


# Least expected numbers beyond a percentile: of draws, so that all lie on one side of it in less than 2.5% of the
# cases; of sequences, so that their spread shows its error (benchmarks/sampled_intervals.py).
_BEYOND = 3.7, 2.0
_LEVEL = 0.975  # of Student's factors, for intervals of 95%
_TIED = 1e-9  # relative: values this near to a percentile equal it up to rounding (sums in another order)
TARGETS = "all queries of these inputs", "inputs like these"  # populations of the intervals
Ends = tuple[float, float]


@dataclass(frozen=True)
class SampledEstimate:
    """An estimate of a statistic from drawn queries."""

    statistic: str  # name of the statistic, ``mean``, ``p1``, …
    estimate: float  # estimate from the drawn queries
    these: Ends  # interval for all queries of these sequences, where only the draws vary
    such: Ends  # interval for sequences like these, where whole sequences vary; NaN for a single sequence


def sampled_estimates(
    values: NDArray[np.float64],
    samples: NDArray[np.int64],
    strata: NDArray[np.int64],
    share: float,
    percentiles: Sequence[int] = (1, 5, 10, 25, 50, 75, 90, 95, 99),
) -> list[SampledEstimate]:
    """Estimate mean and percentiles of all queries from queries drawn with equal probability; 95% intervals.

    A statistic is linear in the queries up to its residuals e_i: (y_i - ȳ)/n for the mean, (u_i - p)/n for a
    percentile, where u_i is 1 below it, 0 above, and between for those equal to it. The variance of Σe_i is

        these sequences:   (1 - share) Σ over strata of 2 Σ e_i² - (Σ e_i)², two draws in each
        such sequences:    (c-1)/c Σ over sequences of (Σ e_i / (1 - w))², c sequences (clusters)

    where w is the sequence's share of the draws: the jackknife of a mean over sequences of unequal length, in
    which Σ e_i / (1 - w) is the change without the sequence. Student's degrees of freedom are Satterthwaite's: if
    sequences differ only in their levels, with equal variance, their changes have covariances proportional to

        M_st = k_s k_t ([s = t] - w_s - w_t + Σ w²), k = w / (1 - w)

    and the sum of their squares has (Σ M_ss)² / Σ M_st² degrees of freedom: c - 1 for equal lengths, else fewer.

    The interval of the mean is Student's; for sequences like these, which may be few and skewed, Student's after
    Hall's transformation of t, with the skewness γ of the Σe_i of sequences and a = γ/(3√c):

        t + a t² + a² t³/3 + a/2

    The interval of a percentile lies between the percentiles at the ends of Wilson's interval of its level; it is
    missing (NaN) if too few draws or effective sequences (degrees of freedom + 1) lie beyond.

    Source: Cochran 1977, Sampling Techniques, §5.4 and §11; Durbin 1959 (the jackknife); Bell and McCaffrey 2002
    (its degrees of freedom); Hall 1992 (skewness); Woodruff 1952 (medians); Wilson 1927. Deviation: Student's
    factor instead of Hall's; Wilson's interval with an effective number of draws for Woodruff's.

    Values (n,) that are not finite do not count; samples and strata (n,) number each query's sequence, and its
    stratum within one sequence and head; a query is drawn with the probability ``share``. The result is the mean,
    then the percentiles; NaN if nothing is finite.

    Example:
        >>> one = np.zeros(4, np.int64)
        >>> sampled_estimates(np.array([1.0, 2.0, 3.0, 4.0]), one, one, share=1.0, percentiles=[50])[0]
        SampledEstimate(statistic='mean', estimate=2.5, these=(2.5, 2.5), such=(nan, nan))
    """
    finite_rows = np.isfinite(values)
    finite = np.sort(values[finite_rows])
    count = len(finite)
    nothing = (math.nan, math.nan)
    if not count:
        names = ["mean", *(f"p{p}" for p in percentiles)]
        return [SampledEstimate(name, math.nan, nothing, nothing) for name in names]
    spread = _Spread(samples, strata, finite_rows, share)
    mean = float(finite.mean())
    residuals = np.where(finite_rows, values - mean, 0.0) / count
    error, critical = spread.errors(residuals)[0]
    these = mean - critical * error, mean + critical * error
    sums, counts = (spread.of_sequences(np.where(finite_rows, each, 0.0)) for each in (values, 1.0))
    estimates = [SampledEstimate("mean", mean, these, ratio_ends(sums, counts))]
    for percentile in percentiles:
        level = percentile / 100
        cut = float(np.percentile(finite, percentile))
        least = cut - _TIED * abs(cut)
        most = cut + _TIED * abs(cut)
        first = int(np.searchsorted(finite, least))
        last = int(np.searchsorted(finite, most, "right"))
        # Values equal to the percentile count as below it to the fraction that makes its level exact.
        part = min(max((level * count - first) / max(last - first, 1), 0.0), 1.0)
        below = np.where(finite_rows, (values < least) + part * ((values >= least) & (values <= most)), 0.0)
        residuals = np.where(finite_rows, below - below.sum() / count, 0.0) / count
        units = zip(spread.errors(residuals), (count, spread.effective), _BEYOND, strict=True)
        ends = [
            _woodruff(finite, level, *error) if needed <= many * min(level, 1 - level) else nothing
            for error, many, needed in units
        ]
        estimates.append(SampledEstimate(f"p{percentile}", cut, *ends))
    return estimates


def ratio_ends(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Ends:
    """Return a 95% interval for Σ sums / Σ counts over clusters like these, which may be few and skewed.

    Student's interval by the jackknife over clusters, after Hall's transformation; formulas and sources as for the
    mean in :func:`sampled_estimates`, with e_i = (sums_i - r counts_i) / Σ counts. Sums (c,) are finite, counts
    (c,) not negative, and clusters with count 0 do not count; NaN for fewer than two clusters.

    Example:
        >>> [round(end, 2) for end in ratio_ends(np.array([0.0, 1.0, 2.0, 9.0]), np.ones(4))]
        [-1.46, 25.52]
    """
    sums = sums[counts > 0]
    counts = counts[counts > 0]
    clusters = len(counts)
    weights = counts / counts.sum()
    if clusters < 2:
        return math.nan, math.nan
    ratio = float(sums.sum() / counts.sum())
    residuals = (sums - ratio * counts) / counts.sum()
    changes = residuals / (1 - weights)
    error = math.sqrt((clusters - 1) / clusters * float(changes @ changes))
    squares = float(residuals @ residuals)
    critical = float(scipy.stats.t.ppf(_LEVEL, _freedom(weights)))
    shape = float((residuals**3).sum()) / (3 * squares**1.5) if squares else 0.0  # γ/(3√c), γ the skewness
    high, low = (ratio - error * _unskewed(t, shape) for t in (-critical, critical))
    return low, high


class _Spread:
    """Standard errors of sums of residuals, with Student's factor for each."""

    def __init__(
        self, samples: NDArray[np.int64], strata: NDArray[np.int64], finite_rows: NDArray[np.bool_], share: float
    ) -> None:
        self._share = share
        sequences, self._cluster = np.unique(samples, return_inverse=True)
        stratum_names, self._stratum = np.unique(strata, return_inverse=True)
        self._sequences = len(sequences)
        self._strata = len(stratum_names)
        self._weights = self.of_sequences(finite_rows / finite_rows.sum())
        self._clusters = int((self._weights > 0).sum())
        freedom = float(max(1, len(strata) - len(stratum_names))), _freedom(self._weights)
        self.effective = round(freedom[1] + 1, 9)  # number of equal sequences with the same accuracy
        self._critical = [float(scipy.stats.t.ppf(_LEVEL, each)) for each in freedom]

    def errors(self, residuals: NDArray[np.float64]) -> tuple[Ends, Ends]:
        """Return standard errors and factors, for these sequences and for such; NaN if the error is unknown."""
        squares, sums = (np.bincount(self._stratum, e, self._strata) for e in (residuals**2, residuals))
        these = (1 - self._share) * float((PER_STRATUM * squares - sums**2).sum())
        such = math.nan
        c = self._clusters
        if c > 1:
            changes = self.of_sequences(residuals) / (1 - self._weights)
            such = math.sqrt((c - 1) / c * float(changes @ changes))
        return (math.sqrt(max(these, 0.0)), self._critical[0]), (such, self._critical[1])

    def of_sequences(self, residuals: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(self._cluster, residuals, self._sequences).astype(np.float64)


def _freedom(weights: NDArray[np.float64]) -> float:
    """Return Satterthwaite's degrees of freedom of the jackknife, at least 1, from sequences' shares of draws."""
    if weights.max() >= 1:  # a single sequence
        return 1.0
    squares = (weights / (1 - weights)) ** 2
    spread = float(weights @ weights)
    diagonal = 1 + spread - 2 * weights  # M_ss = k_s² diagonal_s; Σ M_st² needs no matrix
    a, b, c = (float((squares * weights**power).sum()) for power in range(3))
    pairs = spread**2 * a**2 + 2 * a * c - 4 * spread * a * b + 2 * b**2
    pairs += float((squares**2 * (diagonal**2 - (diagonal - 1) ** 2)).sum())
    return max(1.0, float((squares * diagonal).sum()) ** 2 / pairs)


def _unskewed(t: float, a: float) -> float:
    """Return the number that t + a t² + a² t³/3 + a/2 maps to ``t``."""
    root = float(np.cbrt(1 + 3 * a * (t - a / 2)))
    return 3 * (t - a / 2) / (1 + root + root**2)


def _woodruff(ordered: NDArray[np.float64], level: float, error: float, critical: float) -> Ends:
    """Return the values at the ends of the interval of a level."""
    if math.isnan(error):
        return math.nan, math.nan
    if error == 0:
        return (float(np.quantile(ordered, level)),) * 2
    draws = level * (1 - level) / error**2  # number of independent draws with this error
    shrink = 1 + critical**2 / draws
    centre = (level + critical**2 / (2 * draws)) / shrink
    reach = critical / shrink * math.sqrt(level * (1 - level) / draws + (critical / (2 * draws)) ** 2)
    low, high = (float(end) for end in np.quantile(ordered, np.clip([centre - reach, centre + reach], 0, 1)))
    return low, high
