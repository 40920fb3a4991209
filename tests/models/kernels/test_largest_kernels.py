"""The largest scores by compiled kernels against sorting in Python, and what torch makes of the operation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag_models.kernels import largest_kernels
from semdiag_models.kernels.largest_kernels import largest_scores


def assert_largest(scores, count):
    values, positions = largest_scores(scores, count)
    assert values.shape == positions.shape == (*scores.shape[:-1], count)
    for row, best, places in zip(scores.tolist(), values.tolist(), positions.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:count]
        assert best == [row[j] for j in expected]
        there = sum(value > -math.inf for value in best)
        assert places[:there] == expected[:there]
        assert all(0 <= place < len(row) for place in places)


@given(st.data())
@pytest.mark.parametrize("many_ties", [True, False])
def test_values_and_positions_are_those_of_sorting(many_ties, data):
    length = data.draw(st.integers(1, 60))
    number = (
        st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 2.0]) if many_ties else st.floats(allow_nan=False, width=32)
    )
    rows = st.lists(st.lists(number, min_size=length, max_size=length), min_size=1, max_size=2)
    assert_largest(torch.tensor(data.draw(rows)), data.draw(st.integers(1, length)))


@pytest.mark.processor
@pytest.mark.parametrize("length", [63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("count", [1, 5, 33, 60])
def test_long_rows(length, count):
    generator = torch.Generator().manual_seed(length)
    normal = torch.randn(4, length, generator=generator)
    assert_largest(normal, count)
    assert_largest(normal * torch.tensor([1e-30, 1e-6, 1e30, 3e37])[:, None], count)
    assert_largest(torch.randint(3, (4, length), generator=generator).float(), count)
    assert_largest(torch.zeros(1, length), count)
    assert_largest(torch.arange(float(length))[None], count)  # each larger than all before
    assert_largest(-torch.arange(float(length))[None], count)


@pytest.mark.parametrize("keys", [0, 1, 4, 5, 6, 40, 600])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_keys_that_may_not_be_attended_to_come_last(keys, scale):
    scores = scale * torch.randn(3, 600, generator=torch.Generator().manual_seed(keys))
    assert_largest(scores.masked_fill(torch.arange(600) >= keys, -math.inf), 5)


def test_rows_of_every_shape():
    scores = torch.randn(2, 3, 4, 300, generator=torch.Generator().manual_seed(0))
    values, positions = largest_scores(scores.transpose(0, 1), 7)
    expected = scores.transpose(0, 1).topk(7, -1)
    assert torch.equal(values, expected.values)
    assert torch.equal(positions, expected.indices)


def test_a_score_that_is_not_a_number_is_the_largest_as_in_torch():
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    scores[2, 100] = torch.nan
    values, positions = largest_scores(scores, 3)
    assert positions[2, 0] == 100
    assert values.isnan().nonzero().tolist() == [[2, 0]]


def test_threads_change_nothing():
    scores, before = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    try:
        found = [torch.set_num_threads(number) or largest_scores(scores, 9) for number in (1, 3)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:Warning")
def test_torch_traces_the_operation_and_not_what_it_found(traced):
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 5, 300, generator=generator)

    def positions(scores):
        return largest_scores(scores, 4)[1]

    assert torch.equal(traced(positions, first)(second), positions(second))


def test_kernels_compile_without_a_folder_to_keep_them_in(monkeypatch):
    njit = largest_kernels.njit

    def no_folder(signature, cache=False, **options):
        if cache:
            raise RuntimeError("no locator available")
        return njit(signature, **options)

    monkeypatch.setattr(largest_kernels, "njit", no_folder)

    @largest_kernels.kernel("int64(int64)")
    def twice(x):
        return 2 * x

    assert twice(3) == 6
