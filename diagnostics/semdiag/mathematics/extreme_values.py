"""The end point of a distribution from block maxima: a reverse Weibull fit, and two tests of whether to trust it.

There is no interval. One that is shown only if an end point is accepted would have to be calibrated given
acceptance, which is impossible: for a law without an end point every accepted interval is wrong, and laws with an
end point can be arbitrarily close to those. docs/theory.md#empirical has the coverage of a 95% interval, law by
law, from benchmarks/end_points.py.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

REPLICATES = 200
LEAST_BLOCKS = 10
LEVEL = 0.05
ENDLESS_LEVEL = 0.01  # stricter: an end point is claimed, and has no interval
_LEAST_SHAPE, _MOST_SHAPE = (
    1.0,
    1000.0,
)  # below, the likelihood has no maximum; above, there is practically no end point
_NEAREST = 1e-4  # end point at least this many ranges above the largest maximum
_WIDEST = 50.0  # end point at most this many ranges above the largest maximum

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReverseWeibull:
    """A distribution of maxima with the end point ``end``: 1 − F falls like ((end − x) / scale)^shape.

    Attributes:
        end: the end point, in units of the values.
        shape: c.
        scale: in units of the values.
    """

    end: float
    shape: float
    scale: float


@dataclass(frozen=True)
class EndPoint:
    """What block maxima say about the largest possible value of the sampling law.

    Attributes:
        estimate: the fitted end point; NaN if there is no fit.
        p_value: of the fit: share of bootstrap samples that fit worse; NaN if there is no fit.
        p_endless: share of samples of a normal law, which has no end point, that show one as near; NaN if there is
            no fit.
        accepted: whether the estimate may be used.
        reason: why not; empty if accepted.
        blocks: number of maxima.
    """

    estimate: float
    p_value: float
    p_endless: float
    accepted: bool
    reason: str
    blocks: int


def fit_reverse_weibull(maxima: ArrayLike) -> ReverseWeibull:
    """Fit a reverse Weibull distribution by maximum likelihood, profiling over the end point.

    Source: docs/theory.md#empirical, after CLEVER (Weng et al. 2018), with scipy's weibull_max.
    Deviation: the shape is kept at 1 or more, where the likelihood has a maximum (Smith 1985).

    Args:
        maxima: (M,), not all equal.

    Raises:
        ValueError: if there are fewer than 2 different values.

    Example:
        >>> drawn = scipy.stats.weibull_max.rvs(3.0, loc=7.0, scale=2.0, size=4000, random_state=1)
        >>> 6.8 < fit_reverse_weibull(drawn).end < 7.2
        True
    """
    values = np.asarray(maxima, np.float64)
    if not np.ptp(values) > 0:
        raise ValueError("A distribution of maxima cannot be fitted to equal values.")
    grid = _grid(15)
    near = int(np.argmin([_profile(values, g)[0] for g in grid]))
    ends = grid[max(near - 1, 0)], grid[min(near + 1, len(grid) - 1)]
    optimum = scipy.optimize.minimize_scalar(
        lambda g: _profile(values, g)[0], bounds=ends, method="bounded", options={"xatol": 1e-4}
    )
    return _profile(values, float(optimum.x))[1]


def estimate_end_point(
    maxima: ArrayLike, draws: int, seed: int = 0, replicates: int = REPLICATES, level: float = LEVEL
) -> EndPoint:
    """Estimate the end point of the sampling law behind block maxima, and test whether the data show one.

    Two tests. The fit: the Kolmogorov distance between maxima and fit, against that of samples drawn from the fit
    and fitted again (parametric bootstrap). The end: its distance above the maxima, in ranges of the maxima,
    against that for blocks of normal draws, a law without an end point; at most 0.01 of those may show one as
    near. The estimate is about the sampling law, not about the supremum of the function: in many dimensions the
    steepest points of a ball are almost never drawn.

    Source: docs/theory.md#empirical; CLEVER (Weng et al. 2018). Deviation: bad fits, and ends that a normal law
    shows as near, are refused; no interval.

    Args:
        maxima: (M,) the largest value of each block.
        draws: values behind each maximum.
        seed: of the bootstrap.
        replicates: bootstrap samples; fewer than 100 cannot show an end point.
        level: a p-value of the fit below it rejects the fit.

    Returns:
        Estimate, p values and whether the estimate may be used.

    Example:
        >>> drawn = np.random.default_rng(1).uniform(0, 7, (40, 5)).max(1)
        >>> end = estimate_end_point(drawn, draws=5)
        >>> end.accepted, 6.9 < end.estimate < 7.3
        (True, True)
        >>> estimate_end_point([1.0, 2.0, 3.0], draws=5).reason
        '3 blocks are too few: at least 10 are needed'
    """
    values = np.asarray(maxima, np.float64)
    refused = _unfit(values)
    if refused:
        return EndPoint(math.nan, math.nan, math.nan, False, refused, len(values))
    fit = fit_reverse_weibull(values)
    observed = _distance(values, fit)
    rng = np.random.default_rng(seed)
    distances = np.empty(replicates)
    for i in range(replicates):
        again = scipy.stats.weibull_max.rvs(
            fit.shape, loc=fit.end, scale=fit.scale, size=len(values), random_state=rng
        )
        refit = fit_reverse_weibull(again)
        distances[i] = _distance(again, refit)
    p_value = float((1 + (distances >= observed).sum()) / (1 + replicates))
    nearest = _endless_gaps(len(values), draws, replicates)
    p_endless = float((1 + (nearest <= _gap(values, fit)).sum()) / (1 + replicates))
    reason = ""
    if p_value < level:
        reason = f"the fit is bad (p = {p_value:.3f})"
    elif p_endless > ENDLESS_LEVEL:
        reason = f"the maxima show no end point (p = {p_endless:.3f} under a normal law, which has none)"
    return EndPoint(fit.end, p_value, p_endless, not reason, reason, len(values))


def _gap(values: Array, fit: ReverseWeibull) -> float:
    """Return the distance of the end point above the largest maximum, in ranges of the maxima."""
    return float((fit.end - values.max()) / np.ptp(values))


@lru_cache(maxsize=8)
def _endless_gaps(blocks: int, draws: int, replicates: int) -> Array:
    """Return the gaps fitted to maxima of blocks of normal draws, a law without an end point."""
    rng = np.random.default_rng(0)
    samples = (rng.normal(size=(blocks, draws)).max(1) for _ in range(replicates))
    return np.array([_gap(values, fit_reverse_weibull(values)) for values in samples])


def _unfit(values: Array) -> str:
    """Return why no distribution can be fitted; empty if one can be."""
    if not np.isfinite(values).all():
        return "not every maximum is finite"
    if len(values) < LEAST_BLOCKS:
        return f"{len(values)} blocks are too few: at least {LEAST_BLOCKS} are needed"
    return "" if np.ptp(values) > 0 else "all maxima are equal"


def _grid(points: int) -> Array:
    """Return logarithms of the gap between largest maximum and end point, in ranges of the maxima."""
    return np.linspace(math.log(_NEAREST), math.log(_WIDEST), points)


def _profile(values: Array, log_gap: float) -> tuple[float, ReverseWeibull]:
    """Return the negative log-likelihood of the best fit with a given end point, and that fit."""
    end = float(values.max() + np.ptp(values) * math.exp(log_gap))
    shape, scale = _weibull(end - values)
    cost = -scipy.stats.weibull_max.logpdf(values, shape, loc=end, scale=scale).sum()
    return float(cost), ReverseWeibull(end, shape, scale)


def _weibull(gaps: Array) -> tuple[float, float]:
    """Return the shape and scale of a Weibull distribution by maximum likelihood, shape from 1 to 1000."""
    logs = np.log(gaps / gaps.max())

    def score(shape: float) -> float:  # decreasing in the shape, zero at the likelihood's maximum
        powers = np.exp(shape * logs)
        return float(1 / shape + logs.mean() - (powers * logs).sum() / powers.sum())

    if score(_LEAST_SHAPE) <= 0:
        shape = _LEAST_SHAPE
    elif score(_MOST_SHAPE) >= 0:
        shape = _MOST_SHAPE
    else:
        shape = float(scipy.optimize.brentq(score, _LEAST_SHAPE, _MOST_SHAPE, xtol=1e-6))
    return shape, float(gaps.max() * np.exp(shape * logs).mean() ** (1 / shape))


def _distance(values: Array, fit: ReverseWeibull) -> float:
    """Return Kolmogorov's distance between the values and the fit."""
    levels = scipy.stats.weibull_max.cdf(np.sort(values), fit.shape, loc=fit.end, scale=fit.scale)
    steps = np.arange(len(values) + 1) / len(values)
    return float(max((steps[1:] - levels).max(), (levels - steps[:-1]).max()))
