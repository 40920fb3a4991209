"""Stability of SGD: hand-computed values, the power law between them, and the broken assumptions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.learning import convex_stability_bound, gap_ratio, nonconvex_stability_bound


def test_by_hand():
    convex = convex_stability_bound(math.log(3), samples=100, step_sum=5.0)
    assert convex.log_value.exp().item() == pytest.approx(2 * 9 / 100 * 5)
    # γc = 1: (1 + 1)/100 · (2 · 0.5 · 9)^½ · 400^½ = 0.02 · 3 · 20.
    other = nonconvex_stability_bound(math.log(3), samples=101, steps=400, step_constant=0.5, smoothness=2.0)
    assert other.log_value.exp().item() == pytest.approx(1.2)


@given(st.floats(-50, 800), st.floats(-50, 800), st.floats(0.01, 100))
def test_the_ratio_is_the_quotient_of_the_bounds(a, b, smoothness):
    bounds = [nonconvex_stability_bound(x, 50, 1000, 0.5, smoothness).log_value.item() for x in (a, b)]
    ratio = gap_ratio(a, b, 0.5 * smoothness).log_value.item()
    assert ratio == pytest.approx(bounds[0] - bounds[1], abs=1e-9)


def test_assumptions_are_never_claimed():
    for bound in (
        convex_stability_bound(0.0, 10, 1.0),
        nonconvex_stability_bound(0.0, 10, 10, 1.0, 1.0),
        gap_ratio(0.0, 1.0, 0.0),
    ):
        assert not bound.holds
    assert gap_ratio(5.0, 4.0, 0.0).log_value.item() == 2.0


def test_every_assumption_of_the_theorems_is_named():
    """Hardt, Recht and Singer 2016: Thm 3.8 and Thm 3.12."""
    convex = " ".join(a.statement for a in convex_stability_bound(0.0, 10, 1.0).unmet)
    assert all(word in convex for word in ("convex", "smooth", "at most 2/γ", "Lipschitz"))
    for bound in (nonconvex_stability_bound(0.0, 10, 10, 1.0, 1.0), gap_ratio(0.0, 1.0, 0.0)):
        named = " ".join(a.statement for a in bound.unmet)
        assert all(word in named for word in ("smooth", "at most c/t", "in [0, 1]", "Lipschitz"))


def test_impossible_quantities_are_refused():
    with pytest.raises(ValueError, match="samples=0"):
        convex_stability_bound(0.0, 0, 1.0)
    with pytest.raises(ValueError, match="samples=1"):
        nonconvex_stability_bound(0.0, 1, 10, 1.0, 1.0)
    with pytest.raises(ValueError, match="Got -1"):
        gap_ratio(0.0, 0.0, -1.0)
