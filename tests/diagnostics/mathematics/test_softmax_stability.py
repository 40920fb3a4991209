"""ξ of softmax rows: hand-computed values, edges, and searches for a pair of rows that breaks a bound."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semdiag.mathematics.paper_stability import (
    paper_fixed_mask_stability,
    paper_form_threshold,
    paper_heavy_hitter_stability,
)
from semdiag.mathematics.softmax_stability import (
    fixed_mask_row_stability,
    fixed_mask_stability,
    heavy_hitter_row_stability,
    heavy_hitter_split_stability,
    heavy_hitter_stability,
    log_largest_weight,
    score_change,
    weight_change,
)

SLACK = 1 + 1e-6  # secants of nearly equal rows carry rounding of about 1e-16 / distance


def naive_stability(delta: float, k: int) -> float:
    if k == 1:
        return 0.0
    p = math.exp(delta) / (math.exp(delta) + k - 1)
    return 2 * p * (1 - p) if p < 0.5 else 0.5


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def secant(z: Tensor, other: Tensor, order: float = 1) -> Tensor:
    everything = torch.ones_like(z, dtype=torch.bool)
    pair = z, other, everything, everything
    return weight_change(*pair) / score_change(*pair, order)


def rows_of_range(generator: torch.Generator, rows: int, k: int, delta: float) -> Tensor:
    """Rows of range at most delta: spread out, or crowded at the two ends where the extremes are."""
    z = uniform(generator, rows, k)
    ends = (z < uniform(generator, rows, 1)).double()
    return delta * torch.where(uniform(generator, rows, 1) < 0.5, z, ends)


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0, 3.66, 5.0, 20.0, 300.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 40, 600])
def test_matches_naive_formula(delta, k):
    assert fixed_mask_stability(delta, k).log_value.exp().item() == pytest.approx(
        naive_stability(delta, k), rel=1e-12
    )
    p = math.exp(delta) / (math.exp(delta) + k - 1)
    assert log_largest_weight(delta, k).exp().item() == pytest.approx(p, rel=1e-12)
    both = heavy_hitter_stability(delta, 0.25, k).log_value.exp().item()
    heights = np.linspace(0.0, delta, 200_001)  # the swap cost is flat at its maximum: off by half a step squared
    swap = (2 / (1 + (k - 1) * np.exp(-heights)) / (0.5 + heights)).max()
    assert both == pytest.approx(naive_stability(delta, k) + swap, rel=delta**2 / 4e10 + 1e-12)
    row = heavy_hitter_row_stability(delta, 0.25, k).log_value.exp().item()
    assert row == pytest.approx(min(2 * k * both, 8.0), rel=1e-12)
    split = heavy_hitter_split_stability(delta, 0.25, k).log_value.exp().item()
    assert split == pytest.approx(min(2 * k * both, 9.0), rel=1e-12)
    paper = paper_heavy_hitter_stability(delta, 0.25, k).log_value.item()
    assert paper == pytest.approx(delta - math.log(k) + math.log(5), rel=1e-12)


def test_hand_computed():
    # δ = ln 4, k = 5: p̄ = 4/8, so ξ* = ½ exactly at the case distinction.
    assert log_largest_weight(math.log(4), 5).exp().item() == pytest.approx(0.5)
    assert fixed_mask_stability(math.log(4), 5).log_value.exp().item() == pytest.approx(0.5)
    # δ = 0, k = 4: p̄ = ¼, ξ* = 2·¼·¾.
    assert fixed_mask_stability(0.0, 4).log_value.exp().item() == pytest.approx(0.375)


@pytest.mark.parametrize("delta", [0.0, 700.0, 1e3, 1e6, math.inf])
def test_edges_do_not_overflow(delta):
    assert fixed_mask_stability(delta, 1).log_value.item() == -math.inf
    assert log_largest_weight(delta, 1).item() == 0.0
    assert fixed_mask_stability(delta, 2).log_value.item() == pytest.approx(math.log(0.5))
    assert -math.inf < fixed_mask_stability(delta, 10**6).log_value.item() <= math.log(0.5)
    if delta < math.inf:
        assert paper_fixed_mask_stability(delta, 5).log_value.item() == pytest.approx(delta - math.log(5))
        assert math.isfinite(paper_heavy_hitter_stability(delta, 1e-300, 5).log_value.item())
        assert heavy_hitter_stability(delta, 1e-300, 1).log_value.item() == pytest.approx(300 * math.log(10))


@pytest.mark.parametrize(
    "form", [heavy_hitter_stability, heavy_hitter_row_stability, paper_heavy_hitter_stability]
)
def test_separation_edges(form):
    at_zero = form([2.0, 2.0, 2.0], [0.5, 0.0, -1.0], 5)
    assert at_zero.log_value[1:].tolist() == [math.inf, math.inf]
    assert [a.measured["rows not positive"] for a in at_zero.unmet if "separation" in a.statement] == [2]
    assert math.isfinite(at_zero.log_value[0].item())
    # Growing as Δ → 0, and nothing is masked at Δ = +inf.
    tiny = [form(2.0, gap, 5).log_value.item() for gap in (1e-1, 1e-9, 1e-200)]
    assert tiny == sorted(tiny)
    unmasked = form(2.0, math.inf, 5)
    fixed = {
        heavy_hitter_stability: fixed_mask_stability,
        heavy_hitter_row_stability: fixed_mask_row_stability,
        paper_heavy_hitter_stability: paper_fixed_mask_stability,
    }[form]
    assert unmasked.log_value.item() == pytest.approx(fixed(2.0, 5).log_value.item())


@pytest.mark.parametrize(("delta", "keys"), [(-1.0, 3), (math.nan, 3), (1.0, 0), (1.0, 2.5)])
def test_impossible_rows_are_refused(delta, keys):
    for form in (
        fixed_mask_stability,
        fixed_mask_row_stability,
        paper_fixed_mask_stability,
        log_largest_weight,
    ):
        with pytest.raises(ValueError, match="Got"):
            form(delta, keys)
    with pytest.raises(ValueError, match="separation is NaN"):
        heavy_hitter_stability(1.0, math.nan, 3)
    with pytest.raises(ValueError, match="at least one key"):
        paper_form_threshold(0)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1e4), st.integers(1, 10**6), st.floats(1e-300, 1e300))
def test_ranges(delta, k, gap):
    xi = fixed_mask_stability(delta, k).log_value.item()
    assert xi <= math.log(0.5) + 1e-15
    weight = log_largest_weight(delta, k).item()
    assert -math.log(k) - 1e-12 <= weight <= 0
    assert heavy_hitter_stability(delta, gap, k).log_value.item() >= xi
    if k > 1:
        assert k * math.exp(xi) >= 1 - 1e-12  # why the row form's constant is 1
        assert heavy_hitter_row_stability(delta, gap, k).log_value.item() >= 0.0


@pytest.mark.parametrize("k", [2, 3, 5, 12, 40])
def test_no_random_pair_exceeds_the_fixed_mask_bounds(k):
    generator = torch.Generator().manual_seed(k)
    for delta in (0.05, 0.5, 1.0, 2.0, 4.0, 8.0, 30.0):
        z = rows_of_range(generator, 400, k, delta)
        other = rows_of_range(generator, 400, k, delta)
        step = 10 ** (-4 * uniform(generator, 400, 1))
        other = z + step * (other - z)  # the set is convex: between two rows of range ≤ δ
        bound = fixed_mask_stability(delta, k).log_value.exp().item()
        assert secant(z, other).nan_to_num().max().item() <= bound * SLACK
        row_bound = fixed_mask_row_stability(delta, k).log_value.exp().item()
        assert secant(z, other, math.inf).nan_to_num().max().item() <= row_bound * SLACK


def climb(k: int, delta: float, order: float, steps: int = 300) -> float:
    """Largest secant that gradient ascent on both rows finds among rows of range ≤ δ, from random starts."""
    generator = torch.Generator().manual_seed(17)
    inner = (4 * torch.randn(64, k, generator=generator, dtype=torch.float64)).requires_grad_()
    move = (4 * torch.randn(64, k, generator=generator, dtype=torch.float64)).requires_grad_()
    optimiser = torch.optim.Adam([inner, move], lr=0.2)
    step = 1e-3 * delta
    best = 0.0
    for _ in range(steps):
        z = step + (delta - 2 * step) * torch.sigmoid(inner)
        other = z + step * (torch.softmax(move, -1) if order == 1 else torch.tanh(move))
        change = torch.linalg.vector_norm(z - other, ord=order, dim=-1)
        found = (torch.softmax(z, -1) - torch.softmax(other, -1)).abs().sum(-1) / change
        best = max(best, found.max().item())
        optimiser.zero_grad()
        (-found.log().sum()).backward()
        optimiser.step()
    return best


@pytest.mark.parametrize(("delta", "k"), [(0.5, 3), (1.0, 40), (2.0, 12), (6.0, 5), (9.0, 40)])
def test_search_attains_the_fixed_mask_bound_and_never_passes_it(delta, k):
    bound = fixed_mask_stability(delta, k).log_value.exp().item()
    assert 0.99 * bound <= climb(k, delta, order=1) <= bound * SLACK


@pytest.mark.parametrize(("delta", "k"), [(1.0, 2), (2.0, 5), (3.0, 40), (9.0, 12)])
def test_search_attains_the_row_bound_and_never_passes_it(delta, k):
    bound = fixed_mask_row_stability(delta, k).log_value.exp().item()
    assert 0.99 * bound <= climb(k, delta, order=math.inf) <= bound * SLACK


def test_search_finds_the_violation_of_the_paper_form():
    paper = paper_fixed_mask_stability(1.0, 40)
    found = climb(40, 1.0, order=1)
    assert found > 1.75 * paper.log_value.exp().item()
    assert not paper.holds
    assert paper.unmet[0].measured["sound over paper, at most"] == pytest.approx(1.7926, abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 10**5), st.floats(0.01, 3.0))
def test_paper_form_fails_exactly_below_the_threshold(n, offset):
    threshold = paper_form_threshold(n).item()
    assert not paper_fixed_mask_stability(max(threshold - offset, 0.0), n).holds
    assert paper_fixed_mask_stability(threshold + offset, n).holds


def test_paper_form_threshold_values():
    assert paper_form_threshold([40, 600]).tolist() == pytest.approx([2.8248, 5.5167], abs=1e-4)
    assert paper_form_threshold([1, 2]).tolist() == [0.0, 0.0]
    assert paper_fixed_mask_stability([0.0, 5.0], 2).holds
    # Never by more than 2: 2(1 − 1/n) as δ → 0.
    ratio = paper_fixed_mask_stability(0.0, 600).unmet[0].measured["sound over paper, at most"]
    assert ratio == pytest.approx(2 * (1 - 1 / 600))
