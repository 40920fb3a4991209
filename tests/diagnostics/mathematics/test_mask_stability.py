"""Sets of largest scores under changes: loops as reference, and the certificate hunted for a counterexample."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.mask_stability import (
    certified,
    kept_in_common,
    predicted_agreement,
    score_rounding,
    top_set,
)


def largest(row, k):
    """Positions of the k largest scores by sorting, lower position first among equals."""
    return set(sorted(range(len(row)), key=lambda j: (-row[j], j))[:k])


def random_rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_set_is_as_defined(k):
    scores = random_rows(1, 30, 9)
    found = top_set(scores, k)
    for i, row in enumerate(scores.tolist()):
        inside = largest(row, k)
        assert set(found.positions[i].tolist()) == inside
        lowest, highest = min(row[j] for j in inside), max(row[j] for j in range(9) if j not in inside)
        assert found.separation[i].item() == lowest - highest
        assert [row[j] for j in found.boundary[i].tolist()] == [lowest, highest]
        assert [o == 0 for o in found.outside[i].tolist()] == [j not in inside for j in range(9)]


def test_a_given_set_is_taken_as_it_is_and_forbidden_keys_are_not_outside():
    scores = torch.tensor([[4.0, -math.inf, 2.0, 1.0]])
    found = top_set(scores, 2, selected=torch.tensor([[3, 0]]))
    assert found.positions.tolist() == [[3, 0]]
    assert found.boundary.tolist() == [[3, 2]]
    assert found.separation.tolist() == [-1.0]
    assert found.outside.tolist() == [[-math.inf, -math.inf, 0.0, -math.inf]]


def test_a_set_cannot_be_larger_than_the_row():
    with pytest.raises(ValueError, match=r"k must lie in 1 … 3"):
        top_set(torch.zeros(3), 4)


@pytest.mark.parametrize("size", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_common_keys_are_counted_as_by_sorting(k, size):
    clean, changes = random_rows(2, 40, 9), size * random_rows(3, 5, 40, 9)
    before = top_set(clean, k)
    found = kept_in_common(clean + changes, before)
    assert found.shape == (5, 40)
    for c in range(5):
        for i in range(40):
            expected = len(largest(clean[i].tolist(), k) & largest((clean + changes)[c, i].tolist(), k))
            assert found[c, i].item() == expected


def test_common_keys_do_not_depend_on_the_order_of_keys_and_ignore_a_constant():
    clean, noisy = random_rows(4, 20, 8), random_rows(5, 3, 20, 8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(6))
    found = kept_in_common(noisy, top_set(clean, 3))
    assert torch.equal(found, kept_in_common(noisy[..., order], top_set(clean[..., order], 3)))
    assert torch.equal(found, kept_in_common(noisy + 1, top_set(clean, 3)))
    assert torch.equal(found, kept_in_common(noisy, top_set(clean, 3), out=torch.empty_like(noisy)))


def test_a_tie_at_the_boundary_leaves_the_set_as_it_was():
    before = top_set(torch.tensor([3.0, 2.0, 1.0]), 2)
    assert kept_in_common(torch.tensor([[3.0, 1.5, 1.5]]), before).tolist() == [2]


def test_all_keys_can_be_lost():
    before = top_set(torch.tensor([3.0, 2.0, 1.0, 0.0]), 2)
    assert kept_in_common(torch.tensor([[-3.0, -2.0, 1.0, 0.0]]), before).tolist() == [0]


@pytest.mark.slow
@given(seed=st.integers(0, 2**31), k=st.integers(1, 7), size=st.floats(1e-3, 2.0), towards=st.floats(0, 1))
def test_a_certified_set_never_changes(seed, k, size, towards):
    """Random changes, mixed with the worst there is: kept keys down, dropped ones up."""
    clean = random_rows(seed, 50, 8)
    before = top_set(clean, k)
    worst = torch.where(before.outside == 0, 1.0, -1.0)
    change = size * (towards * worst + (1 - towards) * random_rows(seed + 1, 50, 8))
    rounding = torch.finfo(torch.float64).eps * (clean.abs().amax(-1) + change.abs().amax(-1))  # of clean + change
    proven = certified(change.amax(-1) - change.amin(-1), before.separation, rounding)
    assert (kept_in_common((clean + change)[None], before)[0][proven] == k).all()


@pytest.mark.parametrize(("below", "says"), [(1e-9, True), (-1e-9, False)])
def test_the_certificate_is_sharp(below, says):
    scores = torch.tensor([1.0, 0.0, -3.0], dtype=torch.float64)
    half = (1 - below) / 2
    change = torch.tensor([-half, half, 0.0], dtype=torch.float64)
    before = top_set(scores, 1)
    assert certified(change.amax() - change.amin(), before.separation).item() is says
    assert (kept_in_common((scores + change)[None], before)[0] == 1).item() is says


@pytest.mark.processor
@given(seed=st.integers(0, 2**31), width=st.integers(1, 64), size=st.floats(0.01, 100))
def test_no_rounding_exceeds_its_bound(seed, width, size):
    """A theorem for every order of the products, hence every processor's: D + 2 roundings, D + 4 allowed."""
    q, k = (size * random_rows(seed + i, 6, width).float() for i in (0, 1))
    exact = (0.3 * q.double()) @ k.double().T
    bound = score_rounding(q, k, 0.3, torch.finfo(torch.float32).eps)
    for scores in ((0.3 * q) @ k.T, 0.3 * (q @ k.T), (q.flip(-1) * 0.3) @ k.flip(-1).T):
        assert ((scores.double() - exact).abs().amax(-1) <= bound).all()


def test_the_prediction_is_that_of_a_gaussian_change():
    gap, sd, draws = 0.3, 0.25, 200_000
    swing = sd * torch.randn(draws, generator=torch.Generator().manual_seed(7))
    survived = (swing > -gap).double().mean().item()
    margin = 4.5 * (survived * (1 - survived) / draws) ** 0.5  # standard errors: other draws fail 7 in a million
    assert predicted_agreement(torch.tensor(gap), torch.tensor(sd)).item() == pytest.approx(survived, abs=margin)


def test_where_nothing_moves_nothing_swaps():
    found = predicted_agreement(torch.tensor([0.1, math.inf, 0.0]), torch.tensor([0.0, 1.0, 2.0]))
    assert found.tolist() == [1.0, 1.0, 0.5]
