"""margins beside exact arithmetic, and beside scores that were really rounded."""

from fractions import Fraction

import pytest
import torch

from semdiag.mathematics.rounding import FORMATS
from semdiag.mathematics.selections import margins

BFLOAT16 = FORMATS["bfloat16"]


def close_rows(rows, keys, seed):
    """Scores of all sizes, every second row with near ties at all places."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, keys, generator=draw) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=draw)
    near = scores[:, :1] * (1 + torch.randn(rows, keys, generator=draw) * 2**-8)
    return torch.where(torch.arange(rows)[:, None] % 2 == 0, scores, near)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_margin_and_certificate_are_those_of_exact_arithmetic(k):
    scores = close_rows(200, 7, 0)
    found, certified = margins(scores, k, BFLOAT16)
    unit, subnormal = Fraction(2) ** -8, Fraction(2) ** -133
    for row, margin, safe in zip(scores.tolist(), found.tolist(), certified.tolist(), strict=True):
        last, after = (Fraction(value) for value in sorted(row, reverse=True)[k - 1 : k + 1])
        assert Fraction(margin) == last - after  # of two float32 numbers of like size float64 is exact
        assert safe == (last - after > unit * (abs(last) + abs(after)) + subnormal)
    assert 0 < int(certified.sum()) < len(scores)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_certified_choice_outlives_rounding_and_others_do_not_all(kind):
    scores, k = close_rows(20_000, 8, 1).clamp(-400, 400), 3
    certified = margins(scores, k, FORMATS[str(kind).removeprefix("torch.")])[1]
    rounded = scores.to(kind).float()
    chosen = scores.topk(k).indices
    kept = rounded.gather(1, chosen).amin(1)
    left = rounded.scatter(1, chosen, -torch.inf).amax(1)
    assert bool((kept > left)[certified].all())
    assert int((kept <= left).sum()) > 100, "there are rows that rounding changes"


def test_rows_that_decide_nothing_have_an_endless_margin():
    least = torch.finfo(torch.float32).min
    rows = torch.tensor([[1.0, 0.0, -torch.inf], [1.0, 0.0, least], [torch.inf, torch.inf, 5.0]])
    found, certified = margins(rows, 2, BFLOAT16)
    assert found.tolist() == [torch.inf] * 3
    assert certified.all()
    assert margins(rows, 3, BFLOAT16)[0].tolist() == [torch.inf] * 3


def test_a_tie_has_no_margin_and_no_certificate():
    for value in (0.0, 1.0, -2.0, torch.inf):
        margin, certified = margins(torch.tensor([[value, value, -5.0]]), 1, BFLOAT16)
        assert (margin.item(), certified.item()) == (0.0, False)
