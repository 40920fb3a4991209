"""Medians and rank correlations of censored numbers."""

import itertools
import math

import numpy as np
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.censored import kaplan_meier_median, logrank_p, median_interval

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


def excess(runs, side):
    """Observed minus expected arrivals of a side, as a textbook counts them, time by time."""
    found = 0.0
    for moment in sorted({time for time, there in runs if there}):
        watched = [i for i, (time, _) in enumerate(runs) if time >= moment]
        arrivals = [i for i, (time, there) in enumerate(runs) if there and time == moment]
        found += sum(i in side for i in arrivals)
        found -= len(arrivals) * sum(i in side for i in watched) / len(watched)
    return found


def by_name(runs, n):
    sides = itertools.combinations(range(len(runs)), n)
    sums = [abs(excess(runs, side)) for side in sides]
    return sum(one >= abs(excess(runs, range(n))) - 1e-9 for one in sums) / len(sums)


def columns(runs):
    return [time for time, _ in runs], [there for _, there in runs]


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=4, max_size=8), st.integers(1, 3))
def test_the_logrank_p_counts_all_relabellings(runs, n):
    assert logrank_p(columns(runs[:n]), columns(runs[n:])) == pytest.approx(by_name(runs, n))


def test_three_runs_a_side_are_never_below_a_tenth_and_equal_ones_tell_nothing():
    first, second = [(10, True), (11, True), (12, True)], [(20, True), (30, False), (30, False)]
    assert logrank_p(columns(first), columns(second)) == pytest.approx(by_name(first + second, 3)) == 0.1
    assert logrank_p(([5] * 3, [True] * 3), ([5] * 3, [True] * 3)) == 1


def test_of_many_runs_the_logrank_p_is_near_that_of_the_large_sample_law():
    generator = np.random.default_rng(0)
    first, second = generator.exponential(1.0, 80), generator.exponential(1.4, 80)
    ended = [np.minimum(times, 1.5) for times in (first, second)]
    there = [times < 1.5 for times in (first, second)]
    law = scipy.stats.logrank(
        *(scipy.stats.CensoredData.right_censored(t, ~d) for t, d in zip(ended, there, strict=True))
    )
    found = logrank_p(*((t.tolist(), d.tolist()) for t, d in zip(ended, there, strict=True)))
    error = 4 * math.sqrt(
        law.pvalue * (1 - law.pvalue) / 20_000
    )  # of 20,000 relabellings, four standard deviations
    assert found == pytest.approx(law.pvalue, abs=error + 0.01)  # and of the law itself, with 80 a side
    assert found == logrank_p(*((t.tolist(), d.tolist()) for t, d in zip(ended, there, strict=True)))
