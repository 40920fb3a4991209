"""Formats with scales, beside loops over tables of their numbers."""

import math

import pytest
import torch

from semdiag import InputError
from semdiag.mathematics.block_formats import SCALED, quantised, with_scales

FOUR = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EIGHT = sorted(
    {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)


def nearest(value, table):
    """The nearest number of a table; of two, the one at an even place; beyond the largest, the largest."""
    size = min(abs(value), table[-1])
    place = min(range(len(table)), key=lambda at: (abs(table[at] - size), at % 2))
    return math.copysign(table[place], value)


def by_loops(row, block, table, scale_of):
    """Blocks of a row, each divided by its scale, rounded, and multiplied again."""
    out = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        largest = max(abs(value) for value in part)
        scale = scale_of(largest) if largest else 1.0
        out += [nearest(value / scale, table) * scale for value in part]
    return out


def below(limit_exponent):
    return lambda largest: 2.0 ** (math.floor(math.log2(largest)) - limit_exponent)


def ratio(limit):
    return lambda largest: torch.tensor(largest / limit).float().item()


TABLES = {
    "mxfp4": (32, FOUR, below(2)),
    "mxfp8": (32, EIGHT, below(8)),
    "fp8-row": (10**6, EIGHT, ratio(448.0)),
    "fp8-block": (128, EIGHT, ratio(448.0)),
    "fp8-block-power": (128, EIGHT, lambda largest: 2.0 ** math.ceil(math.log2(largest / 448.0))),
    "int8-row": (10**6, [float(n) for n in range(128)], ratio(127.0)),
}


@pytest.mark.parametrize("name", SCALED)
def test_numbers_are_those_of_the_definition(name):
    assert set(TABLES) == set(SCALED)
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(6, 150, generator=draw, dtype=torch.float64) * torch.logspace(-8, 8, 6)[:, None]
    values[1, :40] = 0.0
    values[2] = values[2].mul(8).round() / 8  # ties
    found = quantised(values, name)
    block, table, scale_of = TABLES[name]
    expected = [by_loops(row, block, table, scale_of) for row in values.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_plain_format_has_no_scale_and_an_unknown_one_is_refused():
    values = torch.tensor([[1.05, 2.0**-10, 1000.0]])
    assert quantised(values, "fp8-e4m3").tolist() == [[1.0, 0.0, 448.0]]
    with pytest.raises(InputError, match="mxfp4"):
        quantised(values, "mxfp5")


def test_stored_numbers_are_multiplied_with_the_scale_of_their_block():
    numbers = torch.randint(-6, 7, (3, 64), generator=torch.Generator().manual_seed(1)).float()
    scales = torch.tensor([[0.5, 2.0], [1.0, 4.0], [0.25, 8.0]])
    expected = [
        [n * float(scales[row, at // 32]) for at, n in enumerate(numbers[row].tolist())] for row in range(3)
    ]
    assert with_scales(numbers, scales).tolist() == expected
    for wrong in (
        torch.ones(3, 3),
        torch.ones(2, 2),
        torch.ones(3),
        torch.zeros(3, 2),
        torch.full((3, 2), math.nan),
    ):
        with pytest.raises(InputError, match="scales must"):
            with_scales(numbers, wrong)
