"""The end point of a distribution from the maxima of blocks: reverse Weibull, with a test of its fit."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import weibull_max

REPLICATES = 200
LEAST_BLOCKS = 10
LEVEL = 0.05
_LEAST_SHAPE, _MOST_SHAPE = 1.0, 50.0  # below: no maximum of the likelihood; above: no end point in sight
_WIDEST = 50.0  # end point at most this many ranges above the largest maximum
_VAGUE = 10.0  # an interval that reaches further above the largest maximum, in ranges, knows no end point

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ReverseWeibull:
    """A distribution of maxima with the end point ``end``: 1 − F falls like ((end − x) / scale)^shape.

    Attributes:
        end: the end point, in units of the values.
        shape: c.
        scale: likewise in units of the values.
    """

    end: float
    shape: float
    scale: float


@dataclass(frozen=True)
class EndPoint:
    """What block maxima say about the largest value that the sampling law can give.

    Attributes:
        estimate: the fitted end point; NaN if there is no fit.
        low: of the 95 % interval from the parametric bootstrap.
        high: likewise.
        p_value: of the fit: share of bootstrap samples that fit worse; NaN if there is no fit.
        accepted: whether the estimate may be used.
        reason: why not; empty if accepted.
        blocks: number of maxima.
    """

    estimate: float
    low: float
    high: float
    p_value: float
    accepted: bool
    reason: str
    blocks: int


def fit_reverse_weibull(maxima: ArrayLike) -> ReverseWeibull:
    """Maximum likelihood over shapes from 1 to 50, by the profile over the end point.

    Source: scipy.stats.weibull_max for the distribution; CLEVER (Weng et al. 2018) for its use.
    Deviation: the shape is kept at 1 or more, where the likelihood has a maximum (Smith 1985).

    Args:
        maxima: (M,), not all equal.

    Returns:
        The fit; at shape 50 the data show no end point.

    Raises:
        ValueError: if there are fewer than 2 different values.

    Example:
        >>> drawn = weibull_max.rvs(3.0, loc=7.0, scale=2.0, size=4000, random_state=1)
        >>> round(fit_reverse_weibull(drawn).end, 1)
        7.0
    """
    values = np.asarray(maxima, np.float64)
    largest, spread = float(values.max()), float(np.ptp(values))
    if not spread > 0:
        raise ValueError("A distribution of maxima cannot be fitted to equal values.")

    def at(log_gap: float) -> tuple[float, ReverseWeibull]:
        end = largest + spread * math.exp(log_gap)
        shape, scale = _weibull(end - values)
        return float(-weibull_max.logpdf(values, shape, loc=end, scale=scale).sum()), ReverseWeibull(
            end, shape, scale
        )

    grid = np.linspace(math.log(1e-4), math.log(_WIDEST), 15)
    costs = [at(g)[0] for g in grid]
    near = int(np.argmin(costs))
    ends = grid[max(near - 1, 0)], grid[min(near + 1, len(grid) - 1)]
    found = minimize_scalar(lambda g: at(g)[0], bounds=ends, method="bounded", options={"xatol": 1e-4})
    return at(float(found.x))[1]


def estimate_end_point(
    maxima: ArrayLike, seed: int = 0, replicates: int = REPLICATES, level: float = LEVEL
) -> EndPoint:
    """Estimate the end point of the sampling law behind block maxima, and test whether the fit is any good.

    The test: the Kolmogorov distance between maxima and fit, against that of samples drawn from the fit and
    fitted anew (parametric bootstrap); the same samples give the interval. The estimate speaks about the sampling
    law, not about the supremum of the function: in many dimensions a ball's steepest points are never drawn.

    Source: docs/theory.md#empirical; CLEVER (Weng et al. 2018). Deviation: bad fits are refused.

    Args:
        maxima: (M,) the largest value of each block.
        seed: of the bootstrap.
        replicates: bootstrap samples.
        level: a p value below it refuses the fit.

    Returns:
        Estimate, interval, p value and whether it may be used.

    Example:
        >>> drawn = weibull_max.rvs(3.0, loc=7.0, scale=2.0, size=60, random_state=1)
        >>> found = estimate_end_point(drawn, replicates=50)
        >>> found.accepted, found.low < 7.0 < found.high
        (True, True)
        >>> estimate_end_point([1.0, 2.0, 3.0]).reason
        '3 blocks are too few: at least 10 are needed'
    """
    values = np.asarray(maxima, np.float64)
    refused = _unfit(values)
    if refused:
        return EndPoint(math.nan, math.nan, math.nan, math.nan, False, refused, len(values))
    fit = fit_reverse_weibull(values)
    observed = _distance(values, fit)
    rng = np.random.default_rng(seed)
    distances, ends = np.empty(replicates), np.empty(replicates)
    for i in range(replicates):
        again = weibull_max.rvs(fit.shape, loc=fit.end, scale=fit.scale, size=len(values), random_state=rng)
        refit = fit_reverse_weibull(again)
        distances[i], ends[i] = _distance(again, refit), refit.end
    p_value = float((1 + (distances >= observed).sum()) / (1 + replicates))
    low, high = np.percentile(ends, [2.5, 97.5])
    reason = ""
    if p_value < level:
        reason = f"the fit is bad (p = {p_value:.3f})"
    elif high - values.max() > _VAGUE * np.ptp(values):
        reason = f"the maxima show no end point (p = {p_value:.3f}, but the interval reaches to {high:.3g})"
    return EndPoint(fit.end, float(low), float(high), p_value, not reason, reason, len(values))


def _unfit(values: Array) -> str:
    """Why no distribution can be fitted; empty if one can."""
    if not np.isfinite(values).all():
        return "not every maximum is finite"
    if len(values) < LEAST_BLOCKS:
        return f"{len(values)} blocks are too few: at least {LEAST_BLOCKS} are needed"
    return "" if np.ptp(values) > 0 else "all maxima are equal"


def _weibull(gaps: Array) -> tuple[float, float]:
    """Shape and scale of a Weibull distribution by maximum likelihood, shape from 1 to 50."""
    logs = np.log(gaps / gaps.max())

    def score(shape: float) -> float:  # falls in the shape, zero at the maximum of the likelihood
        powers = np.exp(shape * logs)
        return float(1 / shape + logs.mean() - (powers * logs).sum() / powers.sum())

    if score(_LEAST_SHAPE) <= 0:
        shape = _LEAST_SHAPE
    elif score(_MOST_SHAPE) >= 0:
        shape = _MOST_SHAPE
    else:
        shape = float(brentq(score, _LEAST_SHAPE, _MOST_SHAPE, xtol=1e-6))
    return shape, float(gaps.max() * np.exp(shape * logs).mean() ** (1 / shape))


def _distance(values: Array, fit: ReverseWeibull) -> float:
    """Kolmogorov's distance between the values and the fit."""
    levels = weibull_max.cdf(np.sort(values), fit.shape, loc=fit.end, scale=fit.scale)
    steps = np.arange(len(values) + 1) / len(values)
    return float(max((steps[1:] - levels).max(), (levels - steps[:-1]).max()))
