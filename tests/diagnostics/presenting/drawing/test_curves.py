"""Curves of few points: exact where they have points."""

import numpy as np
import pytest

from semdiag.presenting.drawing.panels import cumulative_curve, exceedance_curve

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_cumulative_curve_is_exact_at_its_points():
    values = np.random.default_rng(0).lognormal(size=10_000)
    x, y = cumulative_curve(values)
    assert len(x) == 500
    np.testing.assert_array_equal(x, np.quantile(values, np.linspace(0, 1, 500)))
    assert (y[0], y[-1]) == (0, 1)


def test_what_is_not_positive_counts_but_has_no_point():
    x, y = cumulative_curve([-1.0, 0.0, 1.0, 2.0, np.nan, np.inf])
    assert x.min() > 0
    assert y[-1] == 1
    assert y[0] > 0.5


@pytest.mark.parametrize("curve", [cumulative_curve, exceedance_curve])
@pytest.mark.parametrize("values", [[], [np.nan, np.inf]])
def test_nothing_finite_gives_no_points(curve, values):
    assert [len(part) for part in curve(values)] == [0, 0]


def test_a_single_value():
    assert [part.tolist() for part in cumulative_curve([3.0])] == [[3.0, 3.0], [0.0, 1.0]]


def test_exceedance_keeps_both_ends_when_thinned():
    counts = np.arange(2000)
    x, y = exceedance_curve(counts, points=50)
    assert len(x) <= 50
    assert (x[0], x[-1]) == (0, 1999)
    for at, share in zip(x, y, strict=True):
        assert share == pytest.approx((counts >= at).mean())
