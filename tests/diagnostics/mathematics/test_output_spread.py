"""How much attention outputs differ from query to query."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semdiag.mathematics.output_spread import output_spread


def naive(outputs, counted):
    """One sample and head, query by query."""
    rows = [row for row, there in zip(outputs.double().tolist(), counted.tolist(), strict=True) if there]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    apart = sum((x - m) ** 2 for row in rows for x, m in zip(row, mean, strict=True))
    return apart / sum(x * x for row in rows for x in row)


@given(st.integers(0, 2**31), st.integers(1, 6))
def test_it_is_what_loops_give_and_lies_in_0_to_1(seed, length):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(2, 3, length, 4, generator=generator)
    counted = torch.rand(2, 1, length, generator=generator) < 0.7
    counted[..., 0] = True
    spread = output_spread(mixed, counted)
    assert ((spread >= 0) & (spread <= 1 + 1e-12)).all()
    for b in range(2):
        for h in range(3):
            assert spread[b, h].item() == pytest.approx(naive(mixed[b, h], counted[b, 0]), rel=1e-9, abs=1e-12)


def test_queries_with_one_mixture_do_not_differ_and_opposite_ones_do_wholly():
    same = torch.ones(1, 1, 3, 2)
    assert output_spread(same, torch.tensor(True)).item() == pytest.approx(0)
    opposite = torch.tensor([[[[1.0, 2.0], [-1.0, -2.0]]]])
    assert output_spread(opposite, torch.tensor(True)).item() == pytest.approx(1)


def test_nothing_that_counts_has_no_spread():
    assert output_spread(torch.ones(1, 1, 2, 2), torch.tensor(False)).isnan().all()
