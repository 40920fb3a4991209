"""A bound shows what it rests on; logarithms survive where the numbers do not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.bounds.block_bounds import Assumption, Bound, merged
from semdiag.mathematics.spectral_norms import (
    broadcast,
    float64,
    log,
    log_one_plus,
    log_one_plus_inverse,
    log_product,
    log_root_sum_squares,
    log_sum,
)

MET = Assumption("k is the same", {}, holds=True)
BROKEN = Assumption("separation is positive", {"smallest": -0.5}, holds=False)


def test_broken_assumptions_are_visible():
    bound = Bound(torch.tensor([1.0, 3.0]), (MET, BROKEN), "Thm 5")
    assert not bound.holds
    assert bound.unmet == (BROKEN,)
    assert list(map(str, bound.assumptions)) == [
        "holds: k is the same",
        "assumption not met: separation is positive (smallest = -0.5)",
    ]


def test_merged():
    assert merged([(MET, BROKEN), (BROKEN,), (MET,)]) == (MET, BROKEN)


@given(st.floats(1e-300, 1e300))
def test_one_plus_inverse(x):
    expected = math.log1p(1 / x) if x > 1e-290 else -math.log(x)
    assert log_one_plus_inverse(float64(x)).item() == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_logarithms_of_nothing_and_of_too_much():
    nothing, huge = log(0.0), float64(5000.0)
    assert log_sum(nothing, nothing).item() == -math.inf
    assert log_sum(huge, huge).item() == pytest.approx(5000 + math.log(2))
    assert log_root_sum_squares(torch.stack([huge, nothing])).item() == 5000.0
    assert log_one_plus(nothing).item() == 0.0
    assert log_one_plus_inverse(float64(0.0)).item() == math.inf
    assert [t.tolist() for t in broadcast(1, [2.0, 3.0])] == [[1.0, 1.0], [2.0, 3.0]]
    assert float64(torch.ones(2, dtype=torch.float16)).dtype == torch.float64
    assert log_product(float64(2.0), nothing, float64(math.inf)).item() == -math.inf
    assert log_product(float64(2.0), float64(math.inf)).item() == math.inf
    assert log_product(float64(2.0), float64(3.0)).item() == 5.0
