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
_LEAST_SHAPE, _MOST_SHAPE = 1.0, 1000.0  # below: the likelihood has no maximum; above: practically no end point
_NEAREST = 1e-4  # end point at least this many ranges above the largest maximum
_WIDEST = 50.0  # end point at most this many ranges above the largest maximum
_VAGUE = 10.0  # an interval that reaches further above the largest maximum, in ranges, knows no end point
_LIKELY = 0.5 * 3.841  # a loss of log-likelihood that 95 % of samples stay below (χ², one degree of freedom)

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
        low: of the 95 % interval, the end points whose profile likelihood is not much smaller.
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
    """Maximum likelihood, by the profile over the end point.

    Source: docs/theory.md#empirical, after CLEVER (Weng et al. 2018), with scipy's weibull_max.
    Deviation: the shape is kept at 1 or more, where the likelihood has a maximum (Smith 1985).

    Args:
        maxima: (M,), not all equal.

    Returns:
        The fit.

    Raises:
        ValueError: if there are fewer than 2 different values.

    Example:
        >>> drawn = weibull_max.rvs(3.0, loc=7.0, scale=2.0, size=4000, random_state=1)
        >>> 6.8 < fit_reverse_weibull(drawn).end < 7.2
        True
    """
    values = np.asarray(maxima, np.float64)
    if not np.ptp(values) > 0:
        raise ValueError("A distribution of maxima cannot be fitted to equal values.")
    grid = _grid(15)
    near = int(np.argmin([_profile(values, g)[0] for g in grid]))
    ends = grid[max(near - 1, 0)], grid[min(near + 1, len(grid) - 1)]
    found = minimize_scalar(
        lambda g: _profile(values, g)[0], bounds=ends, method="bounded", options={"xatol": 1e-4}
    )
    return _profile(values, float(found.x))[1]


def estimate_end_point(
    maxima: ArrayLike, seed: int = 0, replicates: int = REPLICATES, level: float = LEVEL
) -> EndPoint:
    """Estimate the end point of the sampling law behind block maxima, and test whether the fit is any good.

    The test: the Kolmogorov distance between maxima and fit, against that of samples drawn from the fit and
    fitted anew (parametric bootstrap). The interval is that of the profile likelihood: with 24 to 40 maxima it
    held the end point about nine times in ten. The estimate speaks about the sampling law, not about the
    supremum of the function: in many dimensions a ball's steepest points are hardly ever drawn.

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
    distances = np.empty(replicates)
    for i in range(replicates):
        again = weibull_max.rvs(fit.shape, loc=fit.end, scale=fit.scale, size=len(values), random_state=rng)
        refit = fit_reverse_weibull(again)
        distances[i] = _distance(again, refit)
    p_value = float((1 + (distances >= observed).sum()) / (1 + replicates))
    low, high = _interval(values, fit)
    reason = ""
    if p_value < level:
        reason = f"the fit is bad (p = {p_value:.3f})"
    elif high - values.max() > _VAGUE * np.ptp(values):
        reason = f"the maxima show no end point (p = {p_value:.3f}, but the interval reaches to {high:.3g})"
    return EndPoint(fit.end, low, high, p_value, not reason, reason, len(values))


def _unfit(values: Array) -> str:
    """Why no distribution can be fitted; empty if one can."""
    if not np.isfinite(values).all():
        return "not every maximum is finite"
    if len(values) < LEAST_BLOCKS:
        return f"{len(values)} blocks are too few: at least {LEAST_BLOCKS} are needed"
    return "" if np.ptp(values) > 0 else "all maxima are equal"


def _grid(points: int) -> Array:
    """Logarithms of the gap between largest maximum and end point, in ranges of the maxima."""
    return np.linspace(math.log(_NEAREST), math.log(_WIDEST), points)


def _profile(values: Array, log_gap: float) -> tuple[float, ReverseWeibull]:
    """Negative log-likelihood of the best fit with a given end point, and that fit."""
    end = float(values.max() + np.ptp(values) * math.exp(log_gap))
    shape, scale = _weibull(end - values)
    cost = -weibull_max.logpdf(values, shape, loc=end, scale=scale).sum()
    return float(cost), ReverseWeibull(end, shape, scale)


def _interval(values: Array, fit: ReverseWeibull) -> tuple[float, float]:
    """End points whose profile likelihood is near the fit's."""
    best = -float(weibull_max.logpdf(values, fit.shape, loc=fit.end, scale=fit.scale).sum())
    found = [_profile(values, g) for g in _grid(80)]
    likely = [other.end for cost, other in found if cost <= best + _LIKELY]
    return min([fit.end, *likely]), max([fit.end, *likely])


def _weibull(gaps: Array) -> tuple[float, float]:
    """Shape and scale of a Weibull distribution by maximum likelihood, shape from 1 to 1000."""
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
