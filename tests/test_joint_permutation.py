"""Rank correlations with the mask as the unit: against scipy, against all relabellings written out, by hand."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joint_permutation import complete_cells, joint_rank_tests, spearman
from scipy.stats import spearmanr

pytestmark = pytest.mark.slow  # of a finished study


def study(seed, tasks=3, masks=6, candidates=2, missing=0.0):
    rng = np.random.default_rng(seed)
    outcome = rng.normal(size=(tasks, masks)).round(1)  # with ties
    outcome[rng.random(outcome.shape) < missing] = math.nan
    return outcome, rng.normal(size=(candidates, tasks, masks)).round(1)


def statistic(outcome, candidate, known):
    """Mean of scipy's ρ over tasks with 5 masks."""
    rows = [
        spearmanr(y[k], x[k]).statistic for y, x, k in zip(outcome, candidate, known, strict=True) if k.sum() >= 5
    ]
    return np.mean(rows) if rows else math.nan


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.15]))
def test_correlations_are_scipys(seed, missing):
    outcome, candidates = study(seed, masks=9, missing=missing)
    found = joint_rank_tests(outcome, candidates, draws=1, resamples=0)
    known = complete_cells(outcome, candidates)
    for c, candidate in enumerate(candidates):
        assert found.correlation[c] == pytest.approx(statistic(outcome, candidate, known), abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("seed", range(3))
def test_p_values_are_those_of_all_relabellings_written_out(seed):
    outcome, candidates = study(seed)
    found = joint_rank_tests(outcome, candidates, resamples=0)
    known = np.ones(outcome.shape, bool)
    drawn = np.array(
        [
            [abs(statistic(outcome[:, list(order)], c, known)) for c in candidates]
            for order in permutations(range(6))
        ]
    )
    own = np.abs(found.correlation)
    assert found.p == pytest.approx((drawn >= own - 1e-9).mean(0))
    assert found.p_family == pytest.approx((drawn.max(1)[:, None] >= own - 1e-9).mean(0))
    assert (found.relabellings, found.tried) == (720, 720)


def test_drawn_relabellings_count_the_observed_one():
    speed = np.tile(np.arange(10.0), (4, 1))
    found = joint_rank_tests(speed, speed[None], draws=99, resamples=0)
    assert found.correlation[0] == 1
    assert (found.p[0], found.tried, found.relabellings) == (0.01, 100, math.factorial(10))


def test_what_all_tasks_share_counts_once():
    """One order of five masks, whether it is seen in one task or in eight: 2 of 120 relabellings do as well."""
    for tasks in (1, 8):
        speed = np.tile(np.arange(5.0), (tasks, 1))
        assert joint_rank_tests(speed, speed[None]).p[0] == pytest.approx(2 / 120)


def test_masks_that_are_all_censored_everywhere_are_one_label():
    speed = np.array([[1.0, 2, math.inf, math.inf, math.inf]] * 2)
    found = joint_rank_tests(speed, speed[None])
    assert found.relabellings == 120 // 6
    assert found.correlation[0] == 1  # censored ones tie with each other, last
    assert found.p[0] >= 1 / 20


def test_all_candidates_see_the_same_cells():
    outcome, candidates = study(1, masks=7)
    candidates[1, 0, 3] = math.nan
    found = joint_rank_tests(outcome, candidates, draws=1, resamples=0)
    without = np.delete(np.arange(7), 3)
    assert found.by_task[0, 0] == pytest.approx(
        spearmanr(outcome[0, without], candidates[0, 0, without]).statistic
    )
    assert found.cells == 20


def test_tasks_of_few_masks_or_of_one_outcome_say_nothing():
    outcome, candidates = study(2)
    outcome[0, :2] = math.nan  # four are left
    outcome[1] = math.inf
    found = joint_rank_tests(outcome, candidates, draws=1, resamples=0)
    assert (found.tasks, found.cells) == (1, 6)
    assert np.isnan(found.by_task[:, :2]).all()
    nothing = joint_rank_tests(outcome[:2], candidates[:, :2], draws=1)
    assert np.isnan([nothing.correlation, nothing.p, nothing.p_family, nothing.low]).all()


@pytest.mark.parametrize("lacks", ["masks", "an order", "candidates"])
def test_a_task_that_is_not_counted_changes_nothing(lacks):
    """Beside a task of five masks: three others; five others that all tie; five others of equal candidates."""
    (alone, values), (other, elsewhere) = study(3, tasks=1, masks=5), study(4, tasks=1, masks=5)
    if lacks == "masks":
        other[0, :2] = math.nan
    elif lacks == "an order":
        other[:] = math.inf
    else:
        elsewhere[:] = 1.0
    outcome, candidates = np.full((2, 10), math.nan), np.full((2, 2, 10), math.nan)
    outcome[0, :5], outcome[1, 5:] = alone, other
    candidates[:, 0, :5], candidates[:, 1, 5:] = values[:, 0], elsewhere[:, 0]
    found, without = joint_rank_tests(outcome, candidates), joint_rank_tests(alone, values)
    for name in ("correlation", "low", "high", "p", "p_family", "relabellings", "tried", "tasks", "cells"):
        np.testing.assert_array_equal(getattr(found, name), getattr(without, name), name)
    np.testing.assert_array_equal(found.by_task, np.c_[without.by_task, [math.nan] * 2])


def test_fewer_than_eight_masks_have_no_interval():
    assert np.isnan(joint_rank_tests(*study(0, masks=7), draws=1).low).all()
    assert np.isfinite(joint_rank_tests(*study(0, masks=8), draws=1).low).all()


@pytest.mark.parametrize(("masks", "few", "given"), [(10, 5, False), (18, 6, False), (12, 9, True), (10, 9, True)])
def test_tasks_that_resamples_mostly_lose_have_no_interval(masks, few, given):
    outcome, candidates = study(0, tasks=4, masks=masks)
    outcome[1:, few:] = math.nan
    assert np.isfinite(joint_rank_tests(outcome, candidates, draws=1, resamples=400).low).all() == given


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"Needs \(T, M\) and \(C, T, M\)"):
        joint_rank_tests(np.zeros((2, 5)), np.zeros((2, 5)))


@pytest.mark.slow
def test_candidates_that_masks_share_in_all_tasks_raise_no_false_alarm():
    """400 studies with effects of masks that all tasks share: more than 33 alarms have probability 0.002."""
    alarms = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        speed, value = rng.normal(size=(2, 10))
        outcome = speed + rng.normal(size=(6, 10))
        alarms += (
            joint_rank_tests(outcome, np.tile(value, (1, 6, 1)), draws=199, resamples=0, seed=seed).p[0] <= 0.05
        )
    assert alarms <= 33


@pytest.mark.slow
def test_intervals_hold_the_truth():
    """200 studies of 18 masks: at least 88% of the 95% intervals hold ρ = 0.5 of the law."""
    r = 2 * math.sin(math.pi * 0.5 / 6)  # Pearson's of a normal law whose Spearman's is 0.5
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        outcome = rng.normal(size=(5, 18))
        value = r * outcome + math.sqrt(1 - r * r) * rng.normal(size=(5, 18))
        found = joint_rank_tests(outcome, value[None], draws=1, resamples=300, seed=seed)
        held += found.low[0] <= 0.5 <= found.high[0]
    assert held >= 176


def test_spearman_with_ties_is_scipys():
    rng = np.random.default_rng(3)
    x, y = rng.integers(0, 4, size=(2, 12)).astype(float)
    assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert math.isnan(spearman(x, np.ones(12)))
