"""Reverse Weibull: the fit against scipy's likelihood, the end point, and the fits that are refused."""

import math

import numpy as np
import pytest
from scipy.stats import weibull_max

from semdiag.mathematics.extreme_values import _endless_gaps, _gap, estimate_end_point, fit_reverse_weibull

SHAPE, END, SCALE = 2.5, 7.0, 2.0


def drawn(size, seed, end=END, scale=SCALE):
    return weibull_max.rvs(SHAPE, loc=end, scale=scale, size=size, random_state=seed)


def likelihood(values, shape, end, scale):
    return weibull_max.logpdf(values, shape, loc=end, scale=scale).sum()


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_is_no_less_likely_than_any_other_on_a_grid(seed):
    values = drawn(40, seed)
    fit = fit_reverse_weibull(values)
    best = likelihood(values, fit.shape, fit.end, fit.scale)
    spread = np.ptp(values)
    for end in values.max() + spread * np.geomspace(1e-3, 40, 25):
        for shape in np.geomspace(1.0, 40.0, 20):
            scale = ((end - values) ** shape).mean() ** (1 / shape)  # the best one for this shape and end
            assert likelihood(values, shape, end, scale) <= best + 1e-3


def test_many_maxima_find_the_end_point():
    fit = fit_reverse_weibull(drawn(20_000, 0))
    # Five standard deviations, which are 0.14% and 0.83% over 30 seeds.
    assert fit.end == pytest.approx(END, rel=0.007)
    assert fit.shape == pytest.approx(SHAPE, rel=0.042)


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_units_do_not_matter(factor):
    values = drawn(30, 1)
    one, other = (estimate_end_point(scaled, 5, replicates=20) for scaled in (values, factor * values))
    assert other.estimate == pytest.approx(factor * one.estimate, rel=1e-4)
    assert (other.p_value, other.p_endless) == (one.p_value, one.p_endless)


def blocks(law, rng, number, draws=5):
    """Maxima of blocks of five draws, as the probe takes them."""
    return getattr(rng, law[0])(*law[1:], size=(number, draws)).max(1)


@pytest.mark.parametrize("number", [24, 40])
def test_laws_without_an_end_point_are_refused(number):
    """benchmarks/end_points.py: 1% of normal samples are accepted; more than 4 of 60 once in 3 000 times."""
    rng = np.random.default_rng(number)
    for law in (("normal",), ("exponential",), ("gumbel",)):
        gaps = [_gap(v, fit_reverse_weibull(v)) for v in (blocks(law, rng, number) for _ in range(60))]
        nearest = np.sort(_endless_gaps(number, 5, 200))[1]  # at most one in 200 is as near: p ≤ 0.01
        assert sum(gap < nearest for gap in gaps) <= 4, law


def test_an_end_that_draws_come_near_is_accepted_and_found():
    samples = [blocks(("uniform",), np.random.default_rng(seed), 40) for seed in range(3)]
    found = [estimate_end_point(values, 5, seed) for seed, values in enumerate(samples)]
    assert sum(f.accepted for f in found) >= 2  # 98% by their end, and 1 in 20 refused by the fit
    assert all(f.estimate == pytest.approx(1, abs=0.05) for f in found if f.accepted)


def test_a_fit_that_is_right_is_refused_once_in_twenty_one():
    """20 bootstrap samples: p < 0.05 only if all fit better, 1 in 21. More than 4 of 8 refused: 1 in 70 000."""
    found = [estimate_end_point(drawn(40, seed), 5, seed, replicates=20) for seed in range(8)]
    assert sum(f.reason.startswith("the fit is bad") for f in found) <= 4


def test_two_heaps_are_refused_with_their_p_value():
    rng = np.random.default_rng(0)
    heaps = np.concatenate([rng.normal(0, 0.1, 20), rng.normal(5, 0.1, 20)])
    found = estimate_end_point(heaps, 5, replicates=60)
    assert not found.accepted
    assert found.p_value < 0.05
    assert found.reason == f"the fit is bad (p = {found.p_value:.3f})"


def test_heavy_tails_have_no_end_point():
    heavy = np.exp(1.5 * np.random.default_rng(1).normal(size=60))
    assert not estimate_end_point(heavy, 5, replicates=60).accepted


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0] * 20, "all maxima are equal"),
        (range(9), "9 blocks are too few: at least 10 are needed"),
        ([math.inf, *range(20)], "not every maximum is finite"),
    ],
)
def test_what_cannot_be_fitted_is_said(values, reason):
    found = estimate_end_point(list(map(float, values)), 5)
    assert (found.accepted, found.reason) == (False, reason)
    assert math.isnan(found.estimate)


def test_equal_values_have_no_fit():
    with pytest.raises(ValueError, match="equal values"):
        fit_reverse_weibull([2.0, 2.0])


def test_the_same_seed_gives_the_same_estimate():
    values = drawn(30, 2)
    assert estimate_end_point(values, 5, 7, 20) == estimate_end_point(values, 5, 7, 20)
