"""Corollary 1: the paper's table to the last printed digit, its control, and the sound comparisons."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag.mathematics.bounds.block_bounds import Bound
from semdiag.mathematics.bounds.corollary import (
    paper_fixed_mask_control,
    paper_input_condition,
    paper_weight_condition,
    sound_input_margin,
    sound_weight_margin,
)
from semdiag.mathematics.score_strips import fixed_mask_rows, heavy_hitter_rows
from semdiag.mathematics.softmax_stability import positive_separation

# Percentiles 75, 90, 95, 100 of δ_s, δ_h and raw key load, and 25, 10, 5, 0 of Δ_h: the paper's table (k = 5).
TABLE = {
    "ListOps": ([8.61, 18.5, 29.4, 87.8], [3.51, 6.74, 9.67, 28.2], [0.016, 0.005, 0.002, 1e-9], [1, 3, 15, 598]),
    "Parity": ([8.30, 10.1, 11.2, 19.4], [2.31, 3.13, 3.78, 9.16], [0.062, 0.022, 0.011, 1e-6], [8, 13, 16, 33]),
    "Even pairs": (
        [2.03, 4.73, 9.44, 14.6],
        [1.03, 2.84, 5.50, 8.25],
        [0.009, 0.003, 0.002, 3e-8],
        [6, 17, 26, 40],
    ),
    "Missing duplicates": (
        [4.63, 9.25, 17.1, 23.9],
        [2.36, 4.25, 4.88, 10.5],
        [0.018, 0.006, 0.003, 1e-7],
        [7, 15, 21, 40],
    ),
}
LEFT_SIDES = {
    "ListOps": ("0.970 0.688 0.564 0.565", "0.898 0.674 0.586 0.612"),
    "Parity": ("0.704 0.759 0.803 1.220", "0.723 0.808 0.862 1.286"),
    "Even pairs": ("3.174 1.976 1.315 1.799", "3.025 2.102 1.424 1.897"),
    "Missing duplicates": ("1.531 1.088 0.666 1.143", "1.529 1.152 0.718 1.204"),
}


def printed(left_side: torch.Tensor) -> str:
    return " ".join(f"{value:.3f}" for value in left_side.tolist())


@pytest.mark.processor
@pytest.mark.parametrize("task", TABLE)
def test_left_sides_of_the_papers_table(task):
    full, masked, separation, load = (torch.tensor(column).double() for column in TABLE[task])
    weight = paper_weight_condition(full, masked, separation)
    inputs = paper_input_condition(full, masked, separation, load / 5)
    assert (printed(weight.left_side), printed(inputs.left_side)) == LEFT_SIDES[task]
    assert not weight.unmet
    assert not inputs.unmet
    if task == "Even pairs":
        assert not weight.met.any()
        assert not inputs.met.any()
    if task == "ListOps":
        assert weight.met.all()


def test_conditions_that_cannot_be_stated_are_not_met():
    for condition in (
        paper_weight_condition([8.0, 8.0, 0.0], 1.0, [0.5, 0.0, 0.5]),
        paper_input_condition([8.0, 8.0, 0.0], 1.0, [0.5, 0.0, 0.5], 1.0),
    ):
        assert condition.met.tolist() == [True, False, False]
        assert condition.left_side[1:].tolist() == [math.inf, math.inf]
        assert [a.statement for a in condition.unmet] == [
            "the full model's dispersion is positive",
            "the separation is positive in every row",
        ]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(1e-6, 1e3), st.floats(1.0, 1e3))
def test_control_a_fixed_mask_never_qualifies_at_the_worst_case(delta, beta):
    control = paper_fixed_mask_control(delta, delta, beta)
    assert not control.met
    assert control.left_side.item() >= 1.0
    assert paper_fixed_mask_control(delta, delta, 0.5).met == (delta < 1e300)
    assert not paper_fixed_mask_control(0.0, 0.0, beta).met


def test_control_by_hand():
    expected = 2 / 4 + (math.log(4 * 3 / 2 + 2) - math.log(5)) / 4
    assert paper_fixed_mask_control(4.0, 2.0, 2.0).left_side.item() == pytest.approx(expected)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 300), st.floats(1e-9, 1e6)), min_size=1, max_size=12), st.integers(2, 40))
def test_a_heavy_hitter_mask_is_never_soundly_better_in_the_weights(rows, k):
    delta, gap = torch.tensor(rows, dtype=torch.float64).T
    full = fixed_mask_rows(torch.full_like(delta, 300.0), max(k, 41))
    margin = sound_weight_margin(heavy_hitter_rows(delta, gap, k), full)
    assert not margin.met
    assert margin.left_side.item() >= 0
    # Nor is a fixed mask: exactly the same constant.
    assert sound_weight_margin(fixed_mask_rows(delta, k), full).left_side.item() == 0


def test_a_single_kept_key_is_the_exception():
    """k = 1: a hard maximum does not react at all until it switches, which takes a move of 2Δ in ‖·‖₁."""
    full = fixed_mask_rows([5.0] * 4, 8)
    margin = sound_weight_margin(heavy_hitter_rows([0.0] * 4, 10.0, 1), full)
    assert margin.met
    assert margin.left_side.exp().item() == pytest.approx(2 / 10)


def test_sound_margins_carry_the_assumptions():
    masked = heavy_hitter_rows([1.0, 1.0], [0.5, -0.1], 2)
    margin = sound_weight_margin(masked, fixed_mask_rows([5.0, 5.0], 8))
    assert margin.left_side.item() == math.inf
    assert [a.measured["rows not positive"] for a in margin.unmet] == [1]
    bound = Bound(torch.tensor(3.0), (positive_separation(-1.0),), "masked")
    inputs = sound_input_margin(bound, Bound(torch.tensor(2.0), (), "full"))
    assert inputs.left_side.item() == 1.0
    assert not inputs.met
    assert len(inputs.unmet) == 1
