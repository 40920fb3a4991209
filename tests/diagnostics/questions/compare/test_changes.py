"""The formulas: total variation against loops over sets, and the identity of both parts of the change."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.questions.compare.measure import output_parts, total_variation

EPS = torch.finfo(torch.float64).eps


def rows(seed, *shape, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("sink", [False, True])
def test_total_variation_is_the_largest_difference_on_any_set_of_keys(sink):
    before, after = rows(0, 6, 5), rows(1, 6, 5)
    found = total_variation(*((x[:, :4] if sink else x) for x in (before, after)))  # the fifth key is the sink
    for one, two, value in zip(before.tolist(), after.tolist(), found.tolist(), strict=True):
        sets = itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in range(6))
        largest = max(abs(sum(one[j] - two[j] for j in chosen)) for chosen in sets)
        assert value == pytest.approx(largest, abs=20 * EPS)  # sums of five numbers below 1


@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0.01, 300))
def test_total_variation_is_a_distance_between_0_and_1(seed, keys, spread):
    one, two, three = rows(seed, 3, 7, keys, spread=spread)
    slack = 4 * keys * EPS  # each row sums to 1 within keys · eps / 2, and so do the sums here
    assert (total_variation(one, one) == 0).all()
    assert torch.equal(total_variation(one, two), total_variation(two, one))
    assert (total_variation(one, two) <= 1 + slack).all()
    assert (total_variation(one, three) <= total_variation(one, two) + total_variation(two, three) + slack).all()


def test_total_variation_of_disjoint_keys_is_1():
    one = torch.eye(4, dtype=torch.float64)
    assert total_variation(one, one.roll(1, 0)).tolist() == [1.0] * 4


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 9), st.floats(1e-3, 1e6))
def test_both_parts_add_up_to_the_change_of_the_output(seed, keys, width, size):
    generator = torch.Generator().manual_seed(seed)
    v, w = size * torch.randn(2, keys, width, generator=generator, dtype=torch.float64)
    p, q = rows(seed + 1, 2, 5, keys)
    by_weights, by_values = output_parts(p, q, v, w)
    # A sum of n products is off by at most n · eps · Σ|terms|; here Σ|terms| ≤ 2 max|v| in each of four sums.
    slack = 8 * (keys + 2) * EPS * torch.cat([v, w]).abs().max()
    assert ((by_weights + by_values) - (q @ w - p @ v)).abs().max() <= slack


def test_each_part_is_0_where_its_cause_is():
    p, q = rows(2, 2, 5, 7)
    v, w = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    same_weights, same_values = output_parts(p, p, v, w), output_parts(p, q, v, v)
    assert (same_weights[0] == 0).all()
    assert (same_values[1] == 0).all()
    assert same_weights[1].abs().min() > 0 < same_values[0].abs().min()
