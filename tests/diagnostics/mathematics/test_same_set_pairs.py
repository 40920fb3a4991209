"""Bounds of pairs of rows over the same keys: by hand, attained, on the way from row to row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semdiag.mathematics.mask_stability import same_set_stability, weight_change_bound
from semdiag.mathematics.softmax_stability import (
    local_stability,
    log_odds_of_largest,
    score_change,
    score_range_change,
    weight_change,
)

# Scores are below 100 in size: exact to 100 · 2⁻⁵³ each, weights to a few such units relatively.
ROUNDING = 1e-13
SCORES = st.lists(st.floats(-30, 30), min_size=2, max_size=8)


def drawn_pair(data: st.DataObject) -> tuple[Tensor, Tensor]:
    z = torch.tensor(data.draw(SCORES), dtype=torch.float64)
    step = st.lists(st.floats(-1, 1), min_size=len(z), max_size=len(z))
    return z, z + 10 ** data.draw(st.floats(-6, 1.5)) * torch.tensor(data.draw(step), dtype=torch.float64)


def bounds_of(z: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖p − p'‖₁, its bound from the range, and ξ of the pair times ‖z − z'‖₁."""
    keys = torch.ones_like(z, dtype=torch.bool)
    spread = score_range_change(z, other, keys, keys)
    odds = (log_odds_of_largest(z, keys) + log_odds_of_largest(other, keys)) / 2
    xi = same_set_stability(odds, spread).log_value.exp()
    change = weight_change(z, other, keys, keys)
    return change, weight_change_bound(spread), xi * score_change(z, other, keys, keys)


@pytest.mark.slow
@given(st.data())
def test_no_pair_exceeds_either_bound(data):
    change, by_range, by_odds = bounds_of(*drawn_pair(data))
    assert change <= by_range * (1 + ROUNDING) + ROUNDING
    assert change <= by_odds * (1 + ROUNDING) + ROUNDING


@given(st.data(), st.floats(0, 1))
def test_the_local_constant_is_no_larger_anywhere_between_the_rows(data, share):
    """What the proof says: ξ_loc on the whole segment, not only at the ends."""
    z, other = drawn_pair(data)
    keys = torch.ones_like(z, dtype=torch.bool)
    odds = (log_odds_of_largest(z, keys) + log_odds_of_largest(other, keys)) / 2
    bound = same_set_stability(odds, score_range_change(z, other, keys, keys)).log_value
    between = local_stability(z + share * (other - z), keys)
    assert between <= bound + 1e-12  # a difference of logarithms below 200, each rounded


@given(st.floats(1e-3, 20), st.integers(1, 5))
def test_the_bound_of_the_weights_is_attained(spread, half):
    """Half of the mass moves up and half down, from as far below as it ends above."""
    z = torch.tensor([spread / 4] * half + [-spread / 4] * half, dtype=torch.float64)
    change, by_range, _ = bounds_of(z, -z)
    assert change.item() == pytest.approx(by_range.item(), rel=1e-12)


def test_by_hand():
    # Odds 1/4 to 4 by a range of ln 16: weights (0.2, 0.8) and (0.8, 0.2), and 2 tanh(ln 2) = 1.2.
    z = torch.tensor([0.0, math.log(4)], dtype=torch.float64)
    change, by_range, _ = bounds_of(z, z.flip(0))
    assert change.item() == pytest.approx(1.2)
    assert by_range.item() == pytest.approx(1.2)
    # Weights (0.8, 0.2) that stay, and that move by a range of 2 ln 2: the odds get as low as 2.
    m = math.log(4)
    assert same_set_stability([m, m], [0.0, 2 * math.log(2)]).log_value.exp().tolist() == pytest.approx(
        [0.32, 4 / 9]
    )


def test_edges():
    assert same_set_stability(math.inf, 0.0).log_value.item() == -math.inf  # a single key
    assert same_set_stability([-0.7, 0.7, 5.0], [9.0, 1.4, 10.0]).log_value.exp().tolist() == [0.5] * 3
    assert same_set_stability(800.0, 1.0).log_value.item() == pytest.approx(math.log(2) - 799.5)
    assert weight_change_bound([0.0, 1e6]).tolist() == [0.0, 2.0]


@given(st.data(), st.floats(-30, 30))
def test_the_same_number_added_to_all_scores_changes_nothing(data, shift):
    z, other = drawn_pair(data)
    keys = torch.ones_like(z, dtype=torch.bool)
    apart = score_range_change(z, other + shift, keys, keys) - score_range_change(z, other, keys, keys)
    assert apart.abs() <= ROUNDING
    moved = score_range_change(z, z + shift, keys, keys)
    assert moved <= ROUNDING
    assert weight_change_bound(moved) <= ROUNDING  # where ‖z − z'‖_∞ would promise up to 30
