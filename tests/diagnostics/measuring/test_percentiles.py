"""Percentile tables against numpy."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.measuring.percentiles import COLUMNS, PERCENTILES, percentile_rows, percentiles, summaries

NAMES = ["p0", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p100"]


@pytest.mark.slow
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_percentiles_are_numpys_default(values):
    found = percentiles(values)
    assert [found[f"p{p}"] for p in PERCENTILES] == np.percentile(values, PERCENTILES).tolist()
    assert found["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert (found["queries"], found["undefined"]) == (len(values), 0)
    assert found["not_positive"] == sum(value <= 0 for value in values)


@pytest.mark.parametrize("size", [*range(1, 25), 99, 100, 101, 4999, 2**14 - 1, 2**14, 50_001])
def test_percentiles_of_many_are_numpys_to_the_last_bit(size):
    values = np.random.default_rng(size).normal(size=size) * 1e3
    found = percentiles(values)
    assert [found[f"p{p}"] for p in PERCENTILES] == np.percentile(values, PERCENTILES).tolist()


def test_a_long_row_of_few_values_is_cut_in_the_same_places():
    values = np.random.default_rng(0).integers(0, 3, 40_000).astype(float)
    found = percentiles(np.append(values, np.inf))
    assert [found[f"p{p}"] for p in PERCENTILES] == np.percentile(values, PERCENTILES).tolist()


def test_interpolation_is_linear():
    found = percentiles([0, 10])
    assert [found[name] for name in NAMES] == [0, 0.1, 0.5, 1, 2.5, 5, 7.5, 9, 9.5, 9.9, 10]


def test_what_is_not_finite_is_counted_and_left_out():
    found = percentiles(np.array([[1.0, np.inf, -np.inf], [np.nan, 3.0, -2.0]], np.float32))
    assert (found["queries"], found["undefined"], found["not_positive"]) == (6, 3, 1)
    assert (found["p0"], found["p50"], found["p100"]) == (-2, 1, 3)
    assert found["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("values", [[], [math.inf, math.nan]])
def test_without_a_finite_value_every_percentile_is_undefined(values):
    found = percentiles(values)
    assert all(math.isnan(found[name]) for name in ("mean", *NAMES))
    assert (found["queries"], found["undefined"], found["not_positive"]) == (len(values), len(values), 0)


@pytest.mark.parametrize("spoilt", [[], [(0, 2), (1, 2), (2, 2)], [(1, 0), (1, 3)], [(0, n) for n in range(5)]])
def test_columns_are_the_percentiles_of_each_row(spoilt):
    """No entry undefined, the same one of every row, other ones of one row, all of one row."""
    values = np.random.default_rng(0).normal(size=(3, 5))
    for place in spoilt:
        values[place] = np.nan
    found = pd.DataFrame(summaries(torch.from_numpy(values)).numpy(), columns=[*COLUMNS])
    expected = pd.DataFrame([*map(percentiles, values)])
    pd.testing.assert_frame_equal(found, expected, check_exact=True, check_dtype=False)


def test_rows_of_other_lengths_are_padded_with_anything():
    values = torch.tensor([[3.0, 1.0, 7.0, -9.0], [2.0, torch.nan, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]]).double()
    found = pd.DataFrame(summaries(values, torch.tensor([3, 2, 0])).numpy(), columns=[*COLUMNS])
    expected = pd.DataFrame([percentiles([3, 1, 7]), percentiles([2, math.nan]), percentiles([])])
    pd.testing.assert_frame_equal(found, expected, check_exact=True, check_dtype=False)


def test_numbers_are_plain_ones():
    assert {type(value) for value in percentiles(np.ones(3, np.float32)).values()} == {int, float}


@pytest.fixture
def rows():
    return pd.DataFrame(
        {
            "model": ["b"] * 4 + ["a"] * 2,
            "layer": [1, 0, 1, 0, 0, 0],
            "head": [0, 1, 0, 0, 0, 0],
            "dispersion": [1.0, 2, 3, 4, 5, 7],
        }
    )


def test_groups_come_in_order_of_appearance(rows):
    table = percentile_rows(rows[rows["model"] == "b"], "dispersion", "layer", "head")
    assert table[["layer", "head", "queries", "p50"]].to_numpy().tolist() == [
        [1, 0, 2, 2],
        [0, 1, 1, 2],
        [0, 0, 1, 4],
    ]
    table = percentile_rows(rows, "dispersion", "model")
    assert table[["model", "queries", "p50"]].to_numpy().tolist() == [["b", 4, 2.5], ["a", 2, 6]]
    by_layer = percentile_rows(rows, "dispersion", "layer")
    assert by_layer[["layer", "mean"]].to_numpy().tolist() == [[1, 2], [0, 4.5]]
