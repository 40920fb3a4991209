"""Intervals of ratios: they cover, and they take a sequence as one observation."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from scipy.stats import spearmanr

from semdiag.measuring.findings import resampling
from semdiag.measuring.findings.resampling import (
    mean_interval,
    rank_correlation_interval,
    ratio_interval,
    sum_ratio_interval,
    tail_levels,
)
from semdiag.measuring.words import FEWEST


def queries(table):
    """A (samples, queries per sample) array as a table, in mixed order."""
    samples, each = np.shape(table)
    rows = pd.DataFrame(
        {"sample": np.repeat(np.arange(samples), each), "dispersion": np.ravel(table).astype(float)}
    )
    return rows.sample(frac=1, random_state=0)


def width(interval):
    return interval.high - interval.low


@pytest.mark.slow
def test_the_interval_covers_a_known_ratio_about_as_often_as_it_says():
    rng, repetitions, covered = np.random.default_rng(0), 100, 0
    for repetition in range(repetitions):
        # The queries of a sample share most of what they are: 95% is reached by whole sequences only.
        shared, own = rng.normal(size=(2, 50, 1)), rng.normal(size=(2, 50, 8))
        above, below = np.exp(shared + 0.3 * own)
        found = ratio_interval(queries(2 * above), queries(below), resamples=120, seed=repetition)
        covered += found.low <= 2 <= found.high
    # 94.5% of 600 were covered; P(Binomial(100, 0.945) < 84) < 1e-4. Queries for sequences would cover 55%.
    assert covered >= 84


@pytest.mark.parametrize(
    ("law", "units"), [("normal", 8), ("normal", 20), ("exponential", 8), ("exponential", 20)]
)
def test_intervals_of_few_sequences_cover_as_often_as_they_say(law, units):
    """Means of few sequences; benchmarks/intervals.py has the table: 0.938, 0.947, 0.902, 0.924 of 4,000.

    Plain percentiles cover 0.885, 0.924, 0.846 and 0.904. Bounds are 3.5 standard errors of 1,500 cases below.
    """
    rng, cases, draws = np.random.default_rng(0), 1500, 300
    truth = 0.0 if law == "normal" else 1.0
    values = getattr(rng, law)(size=(cases, units))
    means = np.take_along_axis(values[:, None], rng.integers(units, size=(cases, draws, units)), 2).mean(2)
    low, high = np.percentile(means, tail_levels(units), axis=1)
    known = {("normal", 8): 0.93, ("normal", 20): 0.945, ("exponential", 8): 0.895, ("exponential", 20): 0.92}
    level = known[law, units]
    covered = ((low <= truth) & (truth <= high)).mean()
    assert covered >= level - 3.5 * math.sqrt(level * (1 - level) / cases)


@pytest.mark.parametrize("units", range(1, FEWEST + 1))
def test_few_sequences_have_no_interval(units):
    """Draws of one sequence do not vary, and those of two stay between them: that is no certainty."""
    few = queries(np.arange(1.0, 3 * units + 1).reshape(units, 3)).assign(other=np.arange(3 * units) % 4.0)
    for found in (
        ratio_interval(few, queries(np.full((units, 3), [2.0, 3.0, 9.0]))),
        ratio_interval(few, queries(np.ones((9, 3)))),
        mean_interval(few, "dispersion"),
        sum_ratio_interval(np.arange(3.0, 3.0 + units), np.full(units, 2.0)),
        rank_correlation_interval(few, "dispersion", "other"),
    ):
        assert math.isfinite(found.estimate)
        assert math.isnan(found.low) == math.isnan(found.high) == (units < FEWEST)
    if units < FEWEST:
        with pytest.raises(ValueError, match=f"needs at least {FEWEST} units. Got {units}"):
            tail_levels(units)


def test_the_interval_of_a_symmetric_mean_is_students_and_of_a_skewed_one_halls():
    """Without skewness it is Student's by scipy; with it, its ends solve Hall's equation for both tails."""
    x = np.array([-3.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 3.0])
    found = sum_ratio_interval(x, np.ones(8))
    assert (found.low, found.high) == pytest.approx(scipy.stats.ttest_1samp(x, 0).confidence_interval())
    x = np.exp(x)
    found, error = sum_ratio_interval(x, np.ones(8)), scipy.stats.sem(x)
    a = scipy.stats.skew(x) / (3 * math.sqrt(8))
    for end, sign in ((found.high, -1), (found.low, 1)):
        t = (x.mean() - end) / error
        assert t + a * t**2 + a**2 * t**3 / 3 + a / 2 == pytest.approx(sign * scipy.stats.t.ppf(0.975, 7))
    assert found.high - found.estimate > 2 * (found.estimate - found.low)


@pytest.mark.parametrize(("law", "truth", "units", "level"), [
    ("normal", 0.0, 8, 0.93), ("lognormal", math.exp(0.5), 8, 0.86), ("lognormal", math.exp(0.5), 30, 0.89),
    ("wide lognormal", math.exp(1.125), 8, 0.80), ("pareto", 5 / 3, 30, 0.90),
])  # fmt: skip
def test_intervals_of_skewed_means_reach_far_enough_up(law, truth, units, level):
    """Resampling held .85 (8) and .88 (30) lognormal means, .70 of wide ones, .86 of Pareto's; 3.5 errors."""
    rng, cases, held = np.random.default_rng(0), 1500, 0
    values = {
        "normal": lambda: rng.normal(size=units), "lognormal": lambda: rng.lognormal(size=units),
        "wide lognormal": lambda: rng.lognormal(sigma=1.5, size=units),
        "pareto": lambda: 1 + rng.pareto(2.5, units),
    }[law]  # fmt: skip
    for _ in range(cases):
        found = sum_ratio_interval(values(), np.ones(units))
        held += found.low <= truth <= found.high
    assert held / cases >= level - 3.5 * math.sqrt(level * (1 - level) / cases)


def test_the_interval_of_a_share_stays_between_0_and_1():
    sums, counts = np.array([9.0, 10.0, 10.0, 10.0, 10.0]), np.full(5, 10.0)
    assert sum_ratio_interval(sums, counts).high > 1 == sum_ratio_interval(sums, counts, share=True).high
    assert (
        sum_ratio_interval(counts - sums, counts).low
        < 0
        == sum_ratio_interval(counts - sums, counts, share=True).low
    )


def test_copies_of_a_query_within_its_sample_do_not_narrow_the_interval():
    rng = np.random.default_rng(1)
    above, below = np.exp(rng.normal(size=(2, 60, 1)))
    once = ratio_interval(queries(above), queries(below))
    copied = ratio_interval(queries(np.repeat(above, 25, 1)), queries(np.repeat(below, 25, 1)))
    assert copied.estimate == pytest.approx(once.estimate)
    assert width(copied) == pytest.approx(width(once))  # the medians of a draw are the same, copies or not


def test_strongly_dependent_queries_give_a_wider_interval_than_independent_ones():
    """√25 times as wide in theory; over 100 seeds at least 2.4 times. Taken as independent: as wide."""
    rng = np.random.default_rng(2)
    alike, apart = np.exp(rng.normal(size=(2, 60, 1))).repeat(25, 2), np.exp(rng.normal(size=(2, 60, 25)))
    assert width(ratio_interval(*map(queries, alike))) > 2 * width(ratio_interval(*map(queries, apart)))


def test_what_both_sides_have_in_common_cancels():
    rng = np.random.default_rng(3)
    below = np.exp(rng.normal(size=(40, 5)))
    found = ratio_interval(queries(3 * below), queries(below))
    assert (found.estimate, found.low, found.high) == pytest.approx((3, 3, 3))
    apart = ratio_interval(queries(3 * below), queries(below[:-1]))
    assert width(apart) > 0.1


@pytest.mark.parametrize("percentile", [5, 50, 95])
def test_the_estimate_is_the_ratio_of_the_percentiles(percentile):
    above, below = np.random.default_rng(4).uniform(1, 2, size=(2, 30, 4))
    found = ratio_interval(queries(above), queries(below), percentile=percentile)
    assert found.estimate == pytest.approx(np.percentile(above, percentile) / np.percentile(below, percentile))
    assert found.low <= found.estimate <= found.high


def test_the_same_seed_draws_the_same():
    above, below = (queries(table) for table in np.random.default_rng(6).uniform(1, 2, size=(2, 30, 4)))
    assert ratio_interval(above, below, seed=1) == ratio_interval(above, below, seed=1)
    assert ratio_interval(above, below, seed=1) != ratio_interval(above, below, seed=2)


def test_samples_may_differ_in_length_and_be_numbered_anyhow():
    rows = pd.DataFrame({"sample": [7, 7, 7, 1000], "separation": [2.0, 4, 6, math.inf]})
    other = pd.DataFrame({"sample": [3, 5], "separation": [1.0, 3]})
    found = ratio_interval(rows, other, "separation", resamples=50)
    assert found.estimate == 2


@pytest.mark.parametrize("values", [[[math.inf, math.nan]], [[0.0, 0.0]]])
def test_a_ratio_that_does_not_exist_is_not_a_number(values):
    found = ratio_interval(queries([[1.0, 2.0]]), queries(values), resamples=10)
    assert all(map(math.isnan, (found.estimate, found.low, found.high)))


def test_without_samples_there_is_no_interval():
    with pytest.raises(ValueError, match=r"^There are no queries to resample\.$"):
        ratio_interval(queries(np.ones((2, 2))), queries(np.ones((0, 2))))


@pytest.mark.parametrize("at_once", [1, 100, 10_000])  # one chunk of values, several, as many as are useful
@pytest.mark.parametrize("percentile", [0, 5, 50, 95, 99.9, 100])
def test_percentiles_of_a_draw_are_those_of_the_sequences_written_out(monkeypatch, percentile, at_once):
    monkeypatch.setattr(resampling, "_AT_ONCE", at_once)
    rng = np.random.default_rng(3)
    values = rng.normal(size=(30, 7)).round(1)
    values[rng.random(values.shape) < 0.1] = np.inf
    rows = pd.DataFrame({"sample": np.repeat(np.arange(30), 7), "dispersion": values.ravel()})
    draws = rng.integers(30, size=(5, 30))
    written_out = [values[draw].ravel() for draw in draws]
    expected = [np.percentile(drawn[np.isfinite(drawn)], percentile) for drawn in written_out]
    times = [np.bincount(draw, minlength=30) for draw in draws]
    found = resampling._Sequences(rows, "dispersion").percentiles(times, percentile)
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_draw_without_a_finite_value_has_no_percentile():
    rows = pd.DataFrame({"sample": [0, 0, 1], "dispersion": [1.0, 3.0, np.nan]})
    found = resampling._Sequences(rows, "dispersion").percentiles([np.array([0, 2]), np.array([1, 1])], 50)
    assert np.isnan(found[0])
    assert found[1] == 2.0
    rows["dispersion"] = np.nan
    assert np.isnan(resampling._Sequences(rows, "dispersion").percentiles([np.array([1, 1])], 50)).all()


def test_rank_correlation_is_that_of_scipy_and_its_interval_that_of_explicit_resampling():
    rng = np.random.default_rng(3)
    rows = pd.DataFrame({"sample": np.repeat(np.arange(20), 10), "x": rng.normal(size=200)})
    rows["y"] = np.round(rows["x"] + rng.normal(size=200))  # with ties
    found = rank_correlation_interval(rows, "x", "y", resamples=50, seed=4)
    assert found.estimate == pytest.approx(spearmanr(rows["x"], rows["y"]).statistic)
    drawn = np.random.default_rng(4).multinomial(20, np.full(20, 1 / 20), size=50)
    explicit = []
    for times in drawn:
        sample = rows.loc[rows.index.repeat(times[rows["sample"]])]
        explicit.append(spearmanr(sample["x"], sample["y"]).statistic)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(explicit, tail_levels(20))))


def test_a_mean_over_rows_is_one_over_samples_of_unequal_length_by_the_jackknife():
    rng = np.random.default_rng(5)
    rows = pd.DataFrame({"sample": np.sort(rng.integers(9, size=60)), "x": rng.random(size=60)})
    found, n = mean_interval(rows, "x"), rows["sample"].nunique()
    assert found.estimate == pytest.approx(rows["x"].mean())
    without = [rows.loc[rows["sample"] != s, "x"].mean() for s in rows["sample"].unique()]
    error = math.sqrt((n - 1) / n * sum((x - found.estimate) ** 2 for x in without))
    assert found.low < found.estimate - 1.5 * error
    assert width(found) == pytest.approx(2 * error * scipy.stats.t.ppf(0.975, n - 1), rel=0.2)  # lengths differ


def test_sequences_that_are_all_alike_have_no_interval_whatever_their_sums_round_to():
    rows = queries(np.full((7, 3), 0.1 + 0.2))
    assert mean_interval(rows, "dispersion").high > 0
    varied = mean_interval(rows, "dispersion").if_varied()
    assert varied.estimate == pytest.approx(0.3)
    assert math.isnan(varied.low)
    assert math.isnan(varied.high)
    other = mean_interval(rows.assign(dispersion=rows["dispersion"] + 1e-6 * rows["sample"]), "dispersion")
    assert other.if_varied() == other


def test_nothing_to_resample_is_not_a_number():
    empty = pd.DataFrame({"sample": [], "x": [], "y": []})
    assert np.isnan(mean_interval(empty, "x").estimate)
    assert np.isnan(rank_correlation_interval(empty, "x", "y").low)
