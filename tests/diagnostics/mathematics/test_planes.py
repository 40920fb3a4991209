"""Planes in parameter space: sizes, angles, distances."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.planes import random_direction, random_plane

SIZES = st.lists(st.integers(2, 9), min_size=1, max_size=5)


def made(sizes, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    tensors = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return scale * torch.randn(ends[-1], generator=generator, dtype=torch.float64), tensors, generator


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_both_directions_are_as_long_as_each_tensor_and_orthogonal_in_it(scale):
    """For these draws: two directions of two numbers that come within 1e-6 of parallel, as one pair in two million
    does, would be less orthogonal than 1e-9."""
    for seed in range(100):
        sizes = random.Random(seed).choices(range(2, 10), k=4)
        origin, tensors, generator = made(sizes, seed, scale)
        plane = random_plane(origin, tensors, generator)
        for part in tensors:
            length = origin[part].norm()
            torch.testing.assert_close(plane.first[part].norm(), length)
            torch.testing.assert_close(plane.second[part].norm(), length)
            assert abs(float(plane.first[part].dot(plane.second[part]))) <= 1e-9 * float(length) ** 2
        x, y = torch.tensor([0.3, -2.0], dtype=torch.float64)
        torch.testing.assert_close(plane.distances(x, y), math.hypot(x, y) * origin.norm(), rtol=1e-9, atol=0)


@given(SIZES, st.integers(0, 2**31), st.floats(-3, 3), st.floats(-3, 3))
def test_distances_are_those_of_the_parameters(sizes, seed, x, y):
    """Up to the rounding of a point: 1e-14 at most, as no coordinate is beyond 100."""
    origin, tensors, generator = made(sizes, seed)
    plane = random_plane(origin, tensors, generator)
    said = plane.distances(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
    true = (plane.point(x, y) - origin).norm()
    torch.testing.assert_close(said, true, rtol=1e-6, atol=1e-9)


def test_zero_tensors_and_single_numbers_stay():
    origin = torch.tensor([2.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    tensors = [slice(0, 1), slice(1, 3), slice(3, 5)]
    plane = random_plane(origin, tensors, torch.Generator().manual_seed(0))
    assert abs(float(plane.first[0])) == pytest.approx(2.0)
    assert plane.second[0] == 0
    assert not plane.first[1:3].any()
    assert not plane.second[1:3].any()
    assert torch.isfinite(plane.first).all()
    assert torch.isfinite(plane.second).all()


def test_parts_outside_the_tensors_do_not_move():
    origin = torch.ones(6, dtype=torch.float64)
    direction = random_direction(origin, [slice(2, 4)], torch.Generator().manual_seed(0))
    assert direction.nonzero().flatten().tolist() == [2, 3]


def test_the_same_draw_in_both_precisions():
    origin = torch.linspace(1, 2, 12)
    single, double = (
        random_direction(o, [slice(0, 12)], torch.Generator().manual_seed(3)) for o in (origin, origin.double())
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)
