"""Medians and rank correlations of censored numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.censored import kaplan_meier_median, median_interval

numbers = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)
ranges = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 50)), min_size=1, max_size=12)


@given(numbers)
def test_the_median_of_known_draws_is_the_median(draws):
    found = median_interval(draws, draws)
    assert found.low == found.high == pytest.approx(np.median(draws))


@pytest.mark.slow
@given(ranges, st.randoms(use_true_random=False))
def test_the_median_of_any_draws_within_the_ranges_lies_within_its_range(pairs, random):
    lows, highs = [low for low, _ in pairs], [low + width for low, width in pairs]
    truth = [random.uniform(low, high) for low, high in zip(lows, highs, strict=True)]
    found = median_interval(lows, highs)
    assert found.low - 1e-9 <= np.median(truth) <= found.high + 1e-9


@pytest.mark.slow
@given(ranges, st.randoms(use_true_random=False))
def test_the_interval_holds_that_of_any_draws_within_the_ranges(pairs, random):
    lows, highs = [low for low, _ in pairs], [low + width for low, width in pairs]
    truth = [random.uniform(low, high) for low, high in zip(lows, highs, strict=True)]
    wide, narrow = median_interval(lows, highs), median_interval(truth, truth)
    assert wide.coverage == narrow.coverage
    if len(pairs) > 1:
        assert wide.interval_low <= narrow.interval_low + 1e-9
        assert wide.interval_high >= narrow.interval_high - 1e-9


@pytest.mark.parametrize("n", range(2, 9))
def test_the_coverage_is_that_of_all_sign_patterns(n):
    """Naive: draw i lies above the median or not, all 2^n patterns alike; the interval fails if too few do."""
    found = median_interval(list(range(n)), list(range(n)))
    rank = int(found.interval_low) + 1  # draws are 0 … n - 1
    assert found.interval_high == n - rank
    held = [rank <= sum(above) <= n - rank for above in itertools.product((0, 1), repeat=n)]
    assert found.coverage == pytest.approx(sum(held) / len(held))
    assert found.coverage >= 0.95 or rank == 1


@pytest.mark.parametrize(
    ("n", "more", "ends", "coverage"),
    [(9, {}, (1, 7), 1 - 2 * (1 + 9) / 2**9), (4, {"confidence": 0.3}, (1, 2), 1 - 2 * (1 + 4) / 2**4)],
)
def test_the_largest_rank_that_reaches_the_confidence_is_taken(n, more, ends, coverage):
    """By hand: with 9 draws the second from each end is enough for 95%, with 4 for 30%."""
    found = median_interval(range(n), range(n), **more)
    assert ((found.interval_low, found.interval_high), found.coverage) == (ends, pytest.approx(coverage))


def test_one_draw_has_no_interval():
    found = median_interval([2.0], [2.0])
    assert (found.low, found.coverage, math.isnan(found.interval_low)) == (2.0, 0.0, True)


def test_draws_of_which_nothing_is_known_leave_everything_open():
    found = median_interval([0.0, 0.0, 3.0], [math.inf, math.inf, 3.0])
    assert (found.low, found.high, found.interval_high) == (0.0, math.inf, math.inf)


@pytest.mark.parametrize(("lows", "highs"), [([], []), ([1.0], []), ([2.0], [1.0]), ([math.nan], [1.0])])
def test_what_is_no_range_is_refused(lows, highs):
    with pytest.raises(ValueError, match="low"):
        median_interval(lows, highs)


def naive_kaplan_meier(durations, arrived):
    """Kaplan and Meier 1958, the product over the times of arrival."""
    share = 1.0
    for time in sorted({t for t, there in zip(durations, arrived, strict=True) if there}):
        at_risk = sum(t >= time for t in durations)
        events = sum(t == time and there for t, there in zip(durations, arrived, strict=True))
        share *= 1 - events / at_risk
        if 1 - share >= 0.5 - 1e-12:
            return time
    return math.inf


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=15))
def test_the_kaplan_meier_median_is_the_naive_one(runs):
    durations, arrived = [t for t, _ in runs], [there for _, there in runs]
    assert kaplan_meier_median(durations, arrived) == naive_kaplan_meier(durations, arrived)


def test_dropping_runs_that_never_arrive_would_make_the_median_smaller():
    durations, arrived = [10, 20, 100, 100], [True, True, False, False]
    assert kaplan_meier_median(durations, arrived) == 20 > kaplan_meier_median([10, 20], [True, True])


def test_no_run_has_no_median():
    with pytest.raises(ValueError, match="no median without runs"):
        kaplan_meier_median([], [])
