"""The cost of swapping a key of a top-k set: against a grid, by hand, at the edges; no pair exceeds it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semdiag.mathematics.mask_stability import heavy_hitter_pair_stability
from semdiag.mathematics.softmax_stability import (
    _log_swap_cost,
    log_largest_weight,
    score_change,
    weight_change,
)

# A cost is a few logarithms and exponentials of numbers of size |ln cost|, each rounded.
ROUNDING = 1e-13


def cost(delta: float, gap: float, k: int) -> float:
    return _log_swap_cost(*(torch.tensor(x, dtype=torch.float64) for x in (delta, gap, k))).item()


def naive_cost(height: float, gap: float, k: int) -> float:
    return math.log(2) - math.log1p((k - 1) * math.exp(-height)) - math.log(2 * gap + height)


@pytest.mark.slow
@given(st.floats(0, 100), st.floats(1e-9, 50), st.integers(1, 10**6), st.floats(0, 1))
def test_no_height_costs_more(delta, gap, k, share):
    """The maximum is at one of three heights: nowhere in between is more, and one of them attains it."""
    found = cost(delta, gap, k)
    assert naive_cost(share * delta, gap, k) <= found + ROUNDING * (1 + abs(found))
    grid = np.linspace(0.0, delta, 2001)
    highest = max(naive_cost(float(height), gap, k) for height in grid[::20])
    highest = max(highest, *(naive_cost(float(height), gap, k) for height in grid))
    # The logarithm's second derivative is at most 1/4 + 1/(2Δ + d)² in size; at a maximum inside, 2Δ + d ≥ 1.
    assert found <= highest + 1.25 * (delta / 2000) ** 2 / 2 + ROUNDING * (1 + abs(found))


@given(st.floats(0, 800), st.floats(1e-300, 1e300), st.integers(1, 10**6))
def test_never_above_the_form_it_replaces(delta, gap, k):
    old = log_largest_weight(delta, k).item() - math.log(gap)
    found = cost(delta, gap, k)
    assert found <= old + ROUNDING * (1 + abs(old))
    assert found >= -math.log(k) - math.log(gap) - ROUNDING * (1 + abs(old))  # keys at the boundary itself


def test_by_hand():
    assert math.exp(cost(0.0, 0.5, 4)) == pytest.approx(0.5)  # 1/(kΔ)
    assert math.exp(cost(7.0, 0.5, 1)) == pytest.approx(2.0)  # a single key weighs 1 at any height
    # k = 2, Δ = 2: the root of e^d = d + 3 is 1.50524, where p̄ = 4.50524/5.50524.
    assert math.exp(cost(9.0, 2.0, 2)) == pytest.approx(2 * 4.50524 / 5.50524**2, rel=1e-5)
    assert math.exp(cost(1.0, 2.0, 2)) == pytest.approx(2 / (1 + math.exp(-1)) / 5)  # δ comes before the root


def test_edges():
    assert cost(2.0, math.inf, 5) == -math.inf  # nothing is masked, nothing swaps
    assert cost(2.0, 0.0, 5) == cost(2.0, -1.0, 5) == math.inf
    assert cost(math.inf, 1.0, 5) == pytest.approx(cost(1e4, 1.0, 5))
    assert math.isfinite(cost(800.0, 1e-300, 10**6))
    many = _log_swap_cost(torch.tensor([0.0, 1.0]), torch.tensor([[0.5], [1.0]]), torch.tensor(3.0))
    assert many.shape == (2, 2)


def high_swaps(generator: torch.Generator, pairs: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Pairs of rows that swap keys standing anywhere above the boundary, moved no further than they must."""
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    size = lambda low, high: 10 ** (low + (high - low) * rand(pairs, 1))  # noqa: E731
    gap, height, ours, theirs = size(-3, 1), size(-2, 1.3), rand(pairs, 1) < 0.5, rand(pairs, 1) < 0.5
    swaps = torch.randint(1, min(k, n - k) + 1, (pairs, 1), generator=generator)
    position = torch.arange(n).expand(pairs, n)
    out, comes = position < swaps, (position >= k) & (position < k + swaps)
    stays = (position >= swaps) & (position < k)
    rest = torch.where(rand(pairs, 1) < 0.7, 0.0, height * rand(pairs, n))
    low = torch.where(position >= k, 0.0, gap)
    z = low + torch.where(out & ours, height, 0.0) + torch.where(stays, rest, 0.0)
    after = torch.where(comes | stays, gap, 0.0)
    other = after + torch.where(comes & theirs, height, 0.0) + torch.where(stays, rest, 0.0)
    return z, other


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_no_swap_of_high_keys_exceeds_the_bound(k):
    z, other = high_swaps(torch.Generator().manual_seed(k), 5000, k, 2 * k + 2)
    everything = torch.ones_like(z, dtype=torch.bool)
    chosen, others = ((~everything).scatter(-1, v.topk(k).indices, True) for v in (z, other))
    bound = heavy_hitter_pair_stability(z, other, chosen, others, everything, everything)
    measured = weight_change(z, other, chosen, others)
    promised = bound.log_value.exp() * score_change(z, other, chosen, others)
    valid = bound.log_value.isfinite()
    assert (chosen != others).any(-1)[valid].sum() > 4000
    # Δ is a difference of scores of size ≤ 30, rounded to 30 · 2⁻⁵², where it is at least 1e-3.
    assert (measured <= promised * (1 + 1e-11))[valid].all()
    assert (measured / promised)[valid].max() > 0.5  # the hunt comes near: half the bound would be exceeded
