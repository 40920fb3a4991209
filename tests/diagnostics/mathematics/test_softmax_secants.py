"""Local stability and secants against naive formulas, autograd and hand-computed rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semdiag.mathematics.softmax_stability import (
    fixed_mask_stability,
    local_stability,
    local_stability_of_weight,
    score_change,
    weight_change,
)

scores_of_rows = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


def secant(z, other, chosen, others, order=1):
    return weight_change(z, other, chosen, others) / score_change(z, other, chosen, others, order)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(scores_of_rows)
def test_local_stability_is_the_jacobians_norm_and_at_most_the_bound(row):
    z = torch.tensor(row, dtype=torch.float64)
    everything = torch.ones_like(z, dtype=torch.bool)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), z)
    norm = jacobian.abs().sum(0).max().item()
    local = local_stability(z, everything).exp().item()
    assert local == pytest.approx(norm, rel=1e-9, abs=1e-14)
    assert local_stability_of_weight(torch.softmax(z, -1).max()).item() == pytest.approx(norm, rel=1e-9, abs=1e-14)
    delta = (z.max() - z.min()).item()
    assert local <= fixed_mask_stability(delta, len(row)).log_value.exp().item() * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(scores_of_rows, st.floats(-20, 20), st.randoms(use_true_random=False))
def test_shifting_and_permuting_change_nothing(row, shift, random):
    z = torch.tensor(row, dtype=torch.float64)
    everything = torch.ones_like(z, dtype=torch.bool)
    order = list(range(len(row)))
    random.shuffle(order)
    moved = z[order] + shift
    assert local_stability(moved, everything).item() == pytest.approx(
        local_stability(z, everything).item(), rel=1e-9, abs=1e-12
    )


def test_edges():
    everything = torch.ones(3, dtype=torch.bool)
    equal = local_stability(torch.zeros(3), everything)
    assert equal.exp().item() == pytest.approx(2 / 3 * 2 / 3)
    assert local_stability(torch.tensor([5.0]), torch.ones(1, dtype=torch.bool)).item() == -math.inf
    # e^−1000 underflows, its logarithm does not.
    assert local_stability(torch.tensor([1000.0, 0.0, 0.0]), everything).item() == pytest.approx(
        2 * math.log(2) - 1000
    )
    masked = torch.tensor([0.0, -math.inf, 0.0])
    assert local_stability(masked, torch.tensor([True, False, True])).exp().item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="selects no key"):
        local_stability(torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="order"):
        score_change(torch.zeros(3), torch.zeros(3), everything, everything, order=2)


def test_secant_by_hand():
    z, other = torch.tensor([0.0, 0.0, 7.0]), torch.tensor([math.log(3), 0.0, -math.inf])
    two = torch.tensor([True, True, False])
    # p = (½, ½), p' = (¾, ¼): change ½ over distance ln 3, whatever the masked key does.
    assert secant(z, other, two, two).item() == pytest.approx(0.5 / math.log(3))
    assert secant(z, other, two, two, math.inf).item() == pytest.approx(0.5 / math.log(3))
    assert secant(z, z, two, two).isnan().item()


def test_a_secant_can_exceed_the_local_value_at_one_end():
    """So measured values are compared with bounds over both ends, never with one end's local value."""
    z, other = torch.tensor([5.0, 0.0]), torch.tensor([0.0, 0.0])
    everything = torch.ones(2, dtype=torch.bool)
    assert secant(z, other, everything, everything) > local_stability(z, everything).exp()
