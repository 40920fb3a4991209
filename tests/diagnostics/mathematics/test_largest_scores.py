"""The largest scores against sorting in Python, whatever the grouping."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics import score_strips as module
from semdiag.mathematics.score_strips import largest_scores


def sorted_places(row):
    return sorted(range(len(row)), key=lambda j: (-row[j], j))


def assert_largest(scores, count):
    for shortest_chosen_row, shortest_grouped_row in ((1, 1), (1, 1024), (256, 1024)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_LONG", shortest_chosen_row)
            patch.setattr(module, "_GROUPED", shortest_grouped_row)
            values, positions = largest_scores(scores, count)
        assert values.shape == (*scores.shape[:-1], count + 1)
        assert positions.shape == (*scores.shape[:-1], count)
        for row, best, places in zip(scores.tolist(), values.tolist(), positions.tolist(), strict=True):
            expected = [j for j in sorted_places(row)[: count + 1] if row[j] > -math.inf]
            there = min(count, len(expected))
            assert places[:there] == expected[:there]
            assert best == [row[j] for j in expected] + [-math.inf] * (count + 1 - len(expected))


@pytest.mark.slow
@given(st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("many_ties", [True, False])
def test_values_and_positions_are_those_of_sorting(many_ties, dtype, data):
    length = data.draw(st.integers(1, 60))
    number = (
        st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0]) if many_ties else st.floats(allow_nan=False, width=32)
    )
    rows = st.lists(st.lists(number, min_size=length, max_size=length), min_size=1, max_size=2)
    assert_largest(torch.tensor(data.draw(rows), dtype=dtype), data.draw(st.integers(1, 12)))


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


@pytest.mark.parametrize("length", [300, 1025, 4099])
def test_scores_that_differ_in_their_last_bits_alone_are_told_apart(length):
    generator = torch.Generator().manual_seed(length)
    steps = torch.stack([torch.randperm(length, generator=generator) for _ in range(3)])
    near_one = 1 + torch.finfo(torch.float32).eps * steps  # all of them within 2⁻¹¹: within one choice's last bits
    assert_largest(near_one, 33)
    assert_largest(near_one - 2, 33)
    few = torch.where(steps < 40, near_one, -1e30)  # more than are chosen, fewer than are looked at
    assert_largest(few, 33)


@pytest.mark.parametrize("keys", [0, 1, 32, 33, 34, 60, 1500])
@pytest.mark.parametrize("largest", [1.0, 3.4e38, -3.4e38, 1e-44])
def test_rows_with_few_keys_and_extreme_scores(keys, largest):
    generator = torch.Generator().manual_seed(keys)
    scores = largest * torch.rand(3, 1500, generator=generator)
    scores[1] *= -1
    hidden = torch.stack([torch.randperm(1500, generator=generator) for _ in range(3)]) >= keys
    assert_largest(scores.masked_fill(hidden, -torch.inf), 33)
