"""The largest scores against sorting in Python, whatever the grouping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics import largest_scores as module
from semdiag.mathematics.largest_scores import add_ranks_, largest_scores


def sorted_places(row):
    return sorted(range(len(row)), key=lambda j: (-row[j], j))


@pytest.fixture(autouse=True, params=[1, 256])
def shortest_grouped_row(request, monkeypatch):
    monkeypatch.setattr(module, "_LONG", request.param)


def assert_largest(scores, count):
    values, positions = largest_scores(scores, count)
    assert values.shape == positions.shape == (*scores.shape[:-1], count)
    for row, best, places in zip(scores.tolist(), values.tolist(), positions.tolist(), strict=True):
        expected = sorted_places(row)[:count]
        there = sum(row[j] > -math.inf for j in expected)
        assert places[:there] == expected[:there]
        assert best == [row[j] for j in expected[:there]] + [-math.inf] * (count - there)


@given(st.data())
@pytest.mark.parametrize("many_ties", [True, False])
def test_values_and_positions_are_those_of_sorting(many_ties, data):
    length = data.draw(st.integers(1, 90))
    number = st.sampled_from([-math.inf, 0.0, 1.0, 2.0]) if many_ties else st.floats(allow_nan=False)
    rows = st.lists(st.lists(number, min_size=length, max_size=length), min_size=1, max_size=3)
    scores = torch.tensor(data.draw(rows), dtype=torch.float64) + 0.0  # -0.0 and 0.0 are the same score
    assert_largest(scores, data.draw(st.integers(1, 12)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [255, 256, 1000, 4099])
@pytest.mark.parametrize("count", [1, 33])
def test_long_rows(length, count, dtype):
    generator = torch.Generator().manual_seed(length)
    assert_largest(torch.randn(4, length, generator=generator, dtype=dtype), count)
    assert_largest(torch.randint(3, (4, length), generator=generator).to(dtype), count)


def test_the_best_may_all_stand_in_one_group():
    scores = -torch.arange(4000.0)[None]
    scores[0, 7::100] += 10_000
    assert_largest(scores, 33)


def test_ranks_are_counted_where_they_are_present():
    ranks = torch.ones(1, 1, 2, 3, dtype=torch.int64)
    positions = torch.tensor([[[[2, 0], [2, 1], [0, 2]]]])
    present = torch.tensor([[[[True, True], [True, False], [True, True]]]])
    add_ranks_(ranks, positions, present)
    assert ranks.tolist() == [[[[2, 1, 3], [2, 1, 2]]]]
