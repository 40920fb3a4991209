"""Pairs of top-k rows with keys swapped at the boundary: measured change against the heavy-hitter bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semdiag.mathematics.mask_stability import heavy_hitter_pair_stability
from semdiag.mathematics.softmax_stability import (
    heavy_hitter_row_stability,
    heavy_hitter_stability,
    score_change,
    weight_change,
)

SLACK = 1 + 1e-6


def secant(z: Tensor, other: Tensor, chosen: Tensor, others: Tensor, order: float = 1) -> Tensor:
    return weight_change(z, other, chosen, others) / score_change(z, other, chosen, others, order)


def top(scores: Tensor, k: int) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k, dim=-1).indices, True)


def swapped_pairs(
    generator: torch.Generator, pairs: int, n: int, k: int, gap: float, delta: float
) -> tuple[Tensor, Tensor]:
    """Pairs of rows of n scores whose top-k sets differ by up to k keys, with Δ ≈ gap and range ≤ δ.

    Both rows come from the same underlying scores; the selected keys lie gap above a boundary. Half of the
    pairs are tight: the keys that swap sit at the boundary and move no further than they must.
    """
    rand = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    base = delta * rand(pairs, n) * rand(pairs, 1) ** 3
    swaps = torch.randint(0, min(k, n - k) + 1, (pairs, 1), generator=generator)
    position = torch.arange(n).expand(pairs, n)
    stays_in, out = position < k - swaps, (position >= k - swaps) & (position < k)
    comes_in = (position >= k) & (position < k + swaps)
    tight = rand(pairs, 1) < 0.5
    margin = torch.where(tight, 0.0, base)
    below = torch.where(tight, 0.0, -rand(pairs, n) * delta)
    z = torch.where(out, gap + margin, torch.where(stays_in, gap + base, below))
    jitter = 1e-3 * rand(pairs, 1) * delta * rand(pairs, n)
    other = torch.where(comes_in, gap + margin, torch.where(stays_in, gap + base, below))
    return z, torch.where(stays_in, (other + jitter).clamp(max=gap + delta), other)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("gap", [1e-6, 0.01, 0.3, 2.5])
def test_no_swapped_pair_exceeds_the_bounds(k, gap):
    generator = torch.Generator().manual_seed(k)
    compared = swapped = 0
    for delta in (0.0, 0.1, 1.0, 4.0, 12.0):
        z, other = swapped_pairs(generator, 500, 2 * k + 3, k, gap, delta)
        chosen, other_chosen = top(z, k), top(other, k)
        everything = torch.ones_like(chosen)
        bound = heavy_hitter_pair_stability(z, other, chosen, other_chosen, everything, everything)
        measured = secant(z, other, chosen, other_chosen)
        valid = measured.isfinite() & bound.log_value.isfinite()
        assert (measured <= bound.log_value.exp() * SLACK)[valid].all()
        row = heavy_hitter_row_stability(delta + 1e-12, gap * (1 - 1e-9), k).log_value.exp()
        in_rows = secant(z, other, chosen, other_chosen, math.inf)
        assert (in_rows <= row * SLACK)[valid].all()
        compared += int(valid.sum())
        swapped += int((chosen != other_chosen).any(-1)[valid].sum())
    assert compared > 1000
    assert swapped > 500


def random_top_k_pairs(generator: torch.Generator, pairs: int, n: int) -> tuple[Tensor, Tensor]:
    scale = 10 ** (4 * torch.rand(pairs, 1, generator=generator, dtype=torch.float64) - 3)
    z = scale * torch.randn(pairs, n, generator=generator, dtype=torch.float64)
    step = 10 ** (-5 * torch.rand(pairs, 1, generator=generator, dtype=torch.float64)) * scale
    return z, z + step * torch.randn(pairs, n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_no_random_pair_exceeds_the_bound(k):
    z, other = random_top_k_pairs(torch.Generator().manual_seed(k), 5000, 8)
    chosen, other_chosen = top(z, k), top(other, k)
    everything = torch.ones_like(chosen)
    bound = heavy_hitter_pair_stability(z, other, chosen, other_chosen, everything, everything)
    assert bound.holds
    assert (secant(z, other, chosen, other_chosen) <= bound.log_value.exp() * SLACK).all()


@pytest.mark.parametrize("gap", [1e-3, 1e-2])
@pytest.mark.parametrize("k", [1, 5])
def test_swapping_everything_attains_the_bounds(k, gap):
    z = torch.cat([torch.full((k,), gap), torch.zeros(k)]).double()
    other = z.flip(0)
    chosen, other_chosen = top(z, k), top(other, k)
    measured = secant(z, other, chosen, other_chosen).item()
    bound = heavy_hitter_stability(0.0, gap, k).log_value.exp().item()
    assert 0.98 * bound <= measured <= bound * SLACK
    in_rows = secant(z, other, chosen, other_chosen, math.inf).item()
    assert in_rows == pytest.approx(2 / gap)
    row = heavy_hitter_row_stability(0.0, gap, k).log_value.exp().item()
    assert 0.99 * row <= in_rows <= row * SLACK


@pytest.mark.parametrize("gap", [1e-3, 0.1, 1.0, 1.9, 2.0])
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_the_row_form_is_attained_up_to_a_separation_of_2(k, gap):
    """No smaller constant will do; 1 + 2/Δ was up to twice as much."""
    z = torch.cat([torch.full((k,), gap, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)])
    in_rows = secant(z, z.flip(0), top(z, k), top(z.flip(0), k), math.inf).item()
    row = heavy_hitter_row_stability(0.0, gap, k).log_value.exp().item()
    assert row == pytest.approx(in_rows, rel=1e-12)


@pytest.mark.slow
@given(st.data(), st.integers(1, 5), st.integers(1, 5), st.floats(-4, 1), st.floats(-12, 1))
def test_no_pair_near_equality_exceeds_the_row_form(data, k, dropped, log_gap, log_noise):
    """Keys swapped across a separation, everything disturbed by noise of any size; δ and Δ as measured."""
    n, swaps = k + dropped, data.draw(st.integers(0, min(k, dropped)))
    noise = st.lists(st.floats(-1, 1), min_size=n, max_size=n).map(torch.tensor)
    gap, size = 10**log_gap, 10**log_noise
    z, other = (size * data.draw(noise).double() for _ in "zz")
    z[:k] += gap
    other[swaps : k + swaps] += gap
    chosen, other_chosen = top(z, k), top(other, k)
    delta = max(range_of(z, chosen), range_of(other, other_chosen))
    separation = min(z[chosen].min() - z[~chosen].max(), other[other_chosen].min() - other[~other_chosen].max())
    if separation <= 0:
        return
    row = heavy_hitter_row_stability(delta, separation.item(), k).log_value.exp().item()
    p, q = (torch.where(s, v, -math.inf).softmax(-1) for v, s in ((z, chosen), (other, other_chosen)))
    # The scores are exact; softmax and differences are rounded, a few units of 1e-16 each.
    assert (p - q).abs().sum().item() <= row * (z - other).abs().max().item() * (1 + 1e-12) + 1e-14


def range_of(scores: Tensor, chosen: Tensor) -> float:
    return (scores[chosen].max() - scores[chosen].min()).item()


def test_one_rows_values_only_can_be_exceeded():
    """Why δ_h and Δ_h are taken over both rows: the first row's values alone promise too much."""
    z = torch.tensor([1.0, 0.0], dtype=torch.float64)
    other = torch.tensor([0.0, 1e-9], dtype=torch.float64)
    chosen, other_chosen = top(z, 1), top(other, 1)
    measured = secant(z, other, chosen, other_chosen).item()
    first_only = heavy_hitter_stability(0.0, 1.0, 1).log_value.exp().item()
    assert measured == pytest.approx(2 * first_only)
    everything = torch.ones_like(chosen)
    both = heavy_hitter_pair_stability(z, other, chosen, other_chosen, everything, everything)
    assert measured <= both.log_value.exp().item()


def broken(statement: str, **changes: Tensor) -> None:
    z = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    pair = {
        "scores": z,
        "other_scores": z,
        "selected": top(z, 2),
        "other_selected": top(z, 2),
        "allowed": torch.ones(4, dtype=torch.bool),
        "other_allowed": torch.ones(4, dtype=torch.bool),
    }
    assert heavy_hitter_pair_stability(**pair).holds
    bound = heavy_hitter_pair_stability(**(pair | changes))
    assert statement in [a.statement for a in bound.unmet]
    assert bound.log_value.item() == math.inf


def test_each_broken_assumption_is_reported():
    z = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    broken("both rows have the same number of unmasked keys", other_selected=top(z, 3))
    shorter = torch.tensor([True, True, True, False])
    broken("both rows have the same allowed keys", other_allowed=shorter)
    random_mask = torch.tensor([True, False, True, False])
    broken("each row keeps its highest-scoring allowed keys", other_selected=random_mask)
    tied = torch.tensor([3.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    broken("the separation is positive in every row", scores=tied)


def test_ignores_masked_scores_and_matches_a_loop():
    generator = torch.Generator().manual_seed(3)
    z, other = random_top_k_pairs(generator, 20, 6)
    allowed = torch.ones(20, 6, dtype=torch.bool)
    allowed[:, 4:] = False
    z, other = z.masked_fill(~allowed, -math.inf), other.masked_fill(~allowed, -math.inf)
    chosen, other_chosen = top(z, 2), top(other, 2)
    bound = heavy_hitter_pair_stability(z, other, chosen, other_chosen, allowed, allowed)
    for i in range(20):
        ranked = [sorted(row[:4].tolist(), reverse=True) for row in (z[i], other[i])]
        delta = max(r[0] - r[1] for r in ranked)
        gap = min(r[1] - r[2] for r in ranked)
        assert bound.log_value[i].item() == pytest.approx(
            heavy_hitter_stability(delta, gap, 2).log_value.item(), rel=1e-12
        )
