"""Scores of rounded operands: torch's own casts as reference, error ≤ bound, and certified rows hunted."""

from dataclasses import replace

import numpy as np
import pytest
import rounded_operands
import torch

from semdiag.mathematics.mask_stability import kept_in_common, top_set
from semdiag.mathematics.rounding import (
    FORMATS,
    _rounding_error,
    rounded,
    rounded_scores,
    score_error,
    survives_rounding,
)

NAMES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
KINDS = ["normal", "apart", "near ties", "rounding boundaries", "powers", "large", "subnormal", "saturating"]


def draws(seed):
    return torch.Generator().manual_seed(seed)


def operands(which, kind, seed, rows=400, keys=12, width=16):
    """Queries and keys (float64 tensors of float32 numbers) of one kind of difficulty."""
    generator = draws(seed)
    q = torch.randn(rows, 1, width, generator=generator, dtype=torch.float64)
    k = torch.randn(rows, keys, width, generator=generator, dtype=torch.float64)
    if which == "near ties":  # all keys within a few last places of one
        k = k[:, :1] * (1 + 2.0**-kind.digits * k)
    if which == "apart":  # the first four keys along the query, by more than roundings, or nearly
        along = torch.randn(rows, keys, 1, generator=generator, dtype=torch.float64)
        along[:, :4] = 1 + along[:, :4].abs()
        k = along * q
    if which == "rounding boundaries":  # half a last place above a number of the format
        q, k = (rounded(x, kind) for x in (q, k))
        q, k = (x * (1 + 2.0**-kind.digits) for x in (q, k))
    if which == "powers":  # at a power of two, or a little below it, where numbers lie twice as close
        below = [torch.randint(3, x.shape, generator=generator) for x in (q, k)]
        q, k = (
            x.sign() * 2.0 ** x.abs().log2().round() * (1 - b * 2.0 ** -(kind.digits + 1))
            for x, b in zip((q, k), below, strict=True)
        )
    sizes = {
        "large": (min(kind.largest / 4, 2.0**100), 1.0),
        "subnormal": (2.0**kind.exponent, 2.0 ** min(0, kind.exponent + 4)),
        "saturating": (kind.largest, 2.0),
    }
    first, second = sizes.get(which, (1.0, 1.0))
    most = torch.finfo(torch.float32).max
    return tuple(x.clamp(-most, most).float().double() for x in (q * first, k * second))


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_torchs_cast_and_stays_within_its_bound(name):
    kind = FORMATS[name]
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=draws(0)).int()
    values = bits.view(torch.float32)  # of every exponent
    grid = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).float()  # all ties of the formats below it
    values = torch.cat([values, grid, torch.zeros(1)])
    values = values[values.isfinite()]
    found = rounded(values, kind)
    inside = values.abs() <= kind.largest
    assert torch.equal(found[inside], values[inside].to(getattr(torch, name)).double())
    assert (found[~inside].abs() == kind.largest).all()
    assert ((found - values.double()).abs() <= _rounding_error(values.abs(), kind)).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_one_rounding_is_attained_and_never_falls(name):
    kind = FORMATS[name]
    half = 2.0**-kind.digits
    smallest = 2.0**kind.exponent
    ties = [1 + half, 2 - half, half * smallest, 3 * half * smallest, 2 * kind.largest]
    ties = torch.tensor(ties, dtype=torch.float64)
    assert torch.equal((rounded(ties, kind) - ties).abs(), _rounding_error(ties, kind))
    assert _rounding_error(torch.zeros(1), kind).item() == 0
    powers = 2.0 ** torch.arange(-160, 127, dtype=torch.float64)
    sizes = torch.cat([powers * (1 + near) for near in (-(2.0**-40), 0, 2.0**-40)])
    assert (_rounding_error(sizes.sort().values, kind).diff() >= 0).all()


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("name", [*NAMES, "float32"])
def test_a_score_is_no_further_off_than_its_bound(name, which):
    """The theorem of docs/theory.md#rounded-operands: no tolerance, as the bound holds float64's own rounding."""
    kind = FORMATS[name]
    for seed, scale in enumerate((0.25, 1.0, -0.3)):
        q, k = operands(which, kind, seed)
        off = (rounded_scores(q, k, scale, kind) - scale * (q @ k.mT)).abs()
        error = score_error(q, k, scale, kind, truncated=False)
        assert (error <= score_error(q, k, scale, kind)).all()
        known = error.isfinite()
        assert known.any() or (which == "saturating" and kind.largest > 2.0**120)  # whose sums float32 cannot hold
        assert (off <= error)[known].all()


@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("name", NAMES)
def test_products_can_nearly_reach_their_bound(name, width):
    """Ties that all round the same way add up: no bound can be a third as large."""
    kind = FORMATS[name]
    x = torch.full((1, width), 1 + 2.0**-kind.digits, dtype=torch.float64)  # ties, which go to 1
    off = (rounded_scores(x, x, 1.0, kind) - x @ x.mT).abs()
    assert (off > score_error(x, x, 1.0, kind) / 3).all()


def test_the_worst_order_of_summation_is_within_the_bound():
    """1 + 2⁻²⁴ + 2⁻²⁴ + …, one after the other in float32, stays at 1; nothing else is rounded."""
    terms, kind = 2**17, FORMATS["float16"]
    x = torch.cat([torch.ones(1), torch.full((terms,), 2.0**-12)]).double()[None]
    assert torch.equal(rounded(x, kind), x)
    products = (x * x)[0].float().numpy()
    score = float(np.add.accumulate(products)[-1])
    assert score == 1
    assert (x @ x.mT).item() - score == terms * 2.0**-24
    assert terms * 2.0**-24 <= score_error(x, x, 1.0, kind).item()


@pytest.mark.parametrize(("x", "last"), [(1.0, 2**-4), (1.4, 2**-3)])  # 1.4² is below 2, and 1.4² + E above
def test_a_bound_by_hand(x, last):
    """q = k = x in e4m3: a = b = 2⁻⁴; E is 2xa + a², and the score's own rounding is that of |z| + E."""
    one, a = torch.full((1, 1), x, dtype=torch.float64), 2**-4
    expected = 2 * x * a + a * a + last
    # The sum's share: γ₆ of less than 3, truncated, and what float64 may lose.
    found = score_error(one, one, 1.0, FORMATS["float8_e4m3fn"]).item()
    assert 0 <= found - expected <= 3 * 7 * 2**-23


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_certified_rows_never_change(name):
    """A theorem, so 0 is exact; fails, too, where nothing is certified or nothing changes."""
    kind, certified, changed, wrong = FORMATS[name], 0, 0, 0
    for seed, which in enumerate(KINDS):
        q, k = operands(which, kind, 10 + seed, rows=4000)
        scores = 0.25 * (q @ k.mT).squeeze(-2)
        before = top_set(scores, 4)
        sure = survives_rounding(scores, score_error(q, k, 0.25, kind).squeeze(-2), before)
        after = top_set(rounded_scores(q, k, 0.25, kind).squeeze(-2), 4).separation
        kept = kept_in_common(rounded_scores(q, k, 0.25, kind).squeeze(-2), before) == 4
        tied = after == 0
        certified, changed = certified + int(sure.sum()), changed + int((~kept).sum())
        wrong += int((sure & (~kept | tied)).sum())
    assert wrong == 0
    assert certified > 100
    assert changed > 100


def test_sums_beyond_float32_are_certified_nothing():
    huge = torch.full((1, 4), 3e38, dtype=torch.float64)
    assert score_error(huge, huge, 1.0, FORMATS["bfloat16"]).isinf().all()


def test_products_that_underflow_are_within_the_bound():
    """2⁻⁷⁶ · 2⁻⁷⁶ is 0 in float32; a scale of 2¹²⁶ makes 2⁻²⁶ of what is lost, more than the operands lose."""
    kind = FORMATS["bfloat16"]
    x = torch.tensor([[2.0**-76]], dtype=torch.float64)
    score = rounded_scores(x, x, 2.0**126, kind)
    assert score.item() == 0
    assert score_error(x, x, 2.0**126, kind).item() >= 2.0**-26


@pytest.mark.parametrize(
    ("width", "scale", "name"),
    [
        (2**20 + 1, 1.0, "bfloat16"),
        *((1, scale, "bfloat16") for scale in (2.0**-127, 2.0**127, float("nan"), float("inf"))),
        (1, 1.0, "float64"),  # whose operands float32 does not hold
    ],
)
def test_nothing_is_known_beyond_the_model(width, scale, name):
    ones = torch.ones(2, width)
    error = score_error(ones, ones[:1], scale, FORMATS[name])
    assert error.shape == (2, 1)
    assert error.isinf().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_costs_its_own_scores_their_bound(bad):
    q, k = torch.ones(3, 2), torch.ones(4, 2)
    q[1, 0], k[2, 1] = bad, bad
    known = score_error(q, k, 1.0, FORMATS["float16"]).isfinite()
    expected = torch.ones(3, 4, dtype=torch.bool)
    expected[1], expected[:, 2] = False, False
    assert torch.equal(known, expected)


def test_a_row_with_an_unknown_error_is_not_certified():
    z = torch.tensor([[3.0, 0.0, 2.5, 1.0]] * 4, dtype=torch.float64)
    error = torch.zeros_like(z)
    error[range(4), range(4)] = torch.inf
    assert not survives_rounding(z, error, top_set(z, 2)).any()
    forbidden = z.masked_fill(error.isinf(), -torch.inf)  # what is known of it does not matter then
    assert survives_rounding(forbidden, error, top_set(forbidden, 2)).all()


@pytest.mark.parametrize("size", rounded_operands.SIZES, ids=["wide", "narrow"])
@pytest.mark.parametrize("which", rounded_operands.KINDS)
def test_the_hunt_finds_no_certified_row_that_changes(which, size):
    """A theorem, so 0 is exact. 10⁸ certified rows: benchmarks/rounded_operands.py."""
    generator = torch.Generator().manual_seed(0)
    small = replace(size, rows=500)
    found = [rounded_operands.hunt(name, which, small, generator) for name in rounded_operands.FORMATS]
    assert sum(both for _, _, both, _ in found) == 0
    assert max(share for *_, share in found) <= 1
    assert sum(sure for sure, *_ in found) > 0 or which == "near ties"
    assert sum(moved for _, moved, *_ in found) > 0


def test_the_hunt_comes_near_the_bound_and_would_see_a_broken_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    size = rounded_operands.SIZES[1]
    assert rounded_operands.hunt("bf16", "sharp", size, generator)[3] > 0.98
    right = rounded_operands.score_error
    monkeypatch.setattr(rounded_operands, "score_error", lambda *given: 0.6 * right(*given))
    *_, both, share = rounded_operands.hunt("bf16", "sharp", size, generator)
    assert both > 0
    assert share > 1


def cut(x, place=None):
    """Numbers in float64 cut towards 0 to 24 digits, or at a place."""
    place = 2.0 ** (torch.frexp(x).exponent - 24) if place is None else place
    return torch.trunc(x / place) * place


def truncated_sum(products, block):
    """Sums of products (rows, D): addends cut at the last place of the largest, then the sum."""
    total = torch.zeros(len(products), dtype=torch.float64)
    for start in range(0, products.shape[1], block):
        addends = torch.cat([products[:, start : start + block], total[:, None]], 1)
        place = 2.0 ** (torch.frexp(addends.abs().amax(1, keepdim=True)).exponent - 24)
        total = cut(cut(addends, place).sum(1))
    return total


@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize("width", [2, 64, 512])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_truncated_sums_are_within_the_truncating_bound(name, width, block):
    """Operands are numbers of 11 digits at most, so that products are exact; the last rounding is left out."""
    kind, generator = FORMATS[name], torch.Generator().manual_seed(width + block)
    for signs in (False, True):
        q, k = torch.rand(2, 200, width, generator=generator, dtype=torch.float64) + 0.1
        q, k = (rounded(x, min(kind, FORMATS["float16"], key=lambda one: one.digits)) for x in (q, k))
        k = k * torch.randn(k.shape, generator=generator).sign() if signs else k
        off = (cut(cut(truncated_sum(q * k, block) * 0.3)) - 0.3 * (q * k).sum(1)).abs()
        assert (off <= score_error(q[:, None], k[:, None], 0.3, kind)[:, 0, 0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 4])
def test_truncated_sums_exceed_the_bound_of_sums_to_nearest(block):
    """Each of 4,096 addends of a little less than a last place of the sum is cut."""
    x = torch.cat([torch.ones(1, 1), torch.full((1, 4096), (2.0**-23 * (1 - 2.0**-12)) ** 0.5)], 1).double()
    x = x.float().double()
    x, kind = x[:, None], FORMATS["float32"]
    products = (x * x)[:, 0]
    off = (truncated_sum(cut(products), block) - products.sum(1)).abs()
    known = score_error(x, x, 1.0, kind)
    assert (off <= known[0, 0]).all()
    gamma = 4101 * 2.0**-24 / (1 - 4101 * 2.0**-24)
    assert (off > gamma * products.sum(1)).all()
