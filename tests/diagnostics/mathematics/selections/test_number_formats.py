"""Formats beside torch's own, and the certificate of a rounding beside roundings that were made."""

import math

import pytest
import torch

from semdiag.mathematics.rounding import FORMATS, last_places, may_swap, number_format
from semdiag_files import InputError


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_torchs(name):
    kind, known = FORMATS[name], torch.finfo(getattr(torch, name))
    assert kind.name == name
    assert (2.0 ** (1 - kind.digits), 2.0**kind.exponent) == (known.eps, known.smallest_normal)
    assert kind.largest == known.max


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e5m2"])
def test_what_overflows_is_what_torch_rounds_to_infinity(name):
    kind = FORMATS[name]
    given = torch.float64 if name == "float32" else torch.float32  # torch rounds float64 by way of float32
    beyond = torch.tensor([kind.overflow], dtype=given)
    rounded = torch.cat([beyond.nextafter(0 * beyond), beyond]).to(getattr(torch, name)).double()
    assert rounded.tolist() == [kind.largest, math.inf]


def near_pairs(kind, count=200_000, seed=0):
    """Pairs of float64 scores a few last places apart, of every size that the format has, and beyond."""
    generator = torch.Generator().manual_seed(seed)
    top = math.frexp(kind.largest)[1] + 1
    exponents = torch.randint(kind.exponent - kind.digits - 2, top, (count,), generator=generator)
    lower = torch.ldexp(1 + torch.rand(count, generator=generator, dtype=torch.float64), exponents)
    lower = lower * torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0).double()
    places = exponents.clamp(min=kind.exponent) - kind.digits + 1
    unit = torch.ldexp(torch.ones(count, dtype=torch.float64), places)
    apart = torch.rand(count, generator=generator, dtype=torch.float64) * 3
    higher = lower + apart * unit
    return (lower, higher) if kind.name == "float32" else (lower.float().double(), higher.float().double())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_pairs_that_may_not_swap_are_never_level_once_rounded(name):
    """The theorem of docs/theory.md#rounded-scores, on pairs near it; torch rounds to nearest."""
    kind = FORMATS[name]
    lower, higher = near_pairs(kind)
    rounded = []
    for score in (lower, higher):
        if name == "float8_e4m3fn":  # which has no infinity: an engine saturates
            score = score.clamp(-kind.largest, kind.largest)
        rounded.append(score.to(getattr(torch, name)).double())
    level = rounded[0] >= rounded[1]
    swap = may_swap(lower, higher, kind)
    assert not (level & ~swap).any()
    assert level.float().mean() > 0.1
    assert (~swap).float().mean() > 0.1  # fails where nothing is ever certified


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"float64"}))  # in which this is computed
def test_what_two_engines_swap_may_swap_however_far_off_they_are(name):
    """The theorem for two engines: z and ẑ anywhere within e(t) of t, often as far apart as they can be."""
    kind, count = FORMATS[name], 200_000
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)

    unit, spare = 2.0**-kind.digits, 2.0 ** (kind.exponent - kind.digits)
    size = torch.exp2(draw(kind.exponent - 3, kind.exponent + 3)).where(draw(0, 1) < 0.5, torch.exp2(draw(-3, 3)))
    lower = size * draw(-1, 1).sign()
    higher = lower + (lower.abs() * unit + spare) * draw(-3, 3)
    error = [unit * score.abs() + spare for score in (lower, higher)]
    own = [score + off * draw(-1.5, 1.5).clamp(-1, 1) for score, off in zip((lower, higher), error, strict=True)]
    other = [score + off * draw(-1.5, 1.5).clamp(-1, 1) for score, off in zip((lower, higher), error, strict=True)]
    swapped = (own[1] >= own[0]) & (other[0] >= other[1])
    assert swapped.float().mean() > 0.1
    slack = 2.0**-49 * (own[1].abs() + own[0].abs())  # float64 rounds here, too: 8 last places
    assert may_swap(own[0] + slack, (own[1] - slack).maximum(own[0] + slack), kind, engines=2)[swapped].all()
    assert not may_swap(own[0] + slack, (own[1] - slack).maximum(own[0] + slack), kind)[swapped].all()
    size = lower.abs()  # where scores are ten units apart, and not four, something is certified
    assert not may_swap(size, size * (1 + 10 * unit) + 20 * spare, kind, engines=2).any()


def test_by_hand():
    one = torch.tensor([1.0], dtype=torch.float64)
    for name, kind in FORMATS.items():
        unit = 2.0 ** (1 - kind.digits)
        assert may_swap(one, one + unit, kind), name  # one last place: half of it to each side
        assert not may_swap(one, one + 2 * unit, kind), name
    least = 2.0**-149
    assert may_swap(torch.tensor([0.0]).double(), torch.tensor([least]).double(), FORMATS["float32"])
    assert not may_swap(torch.tensor([0.0]).double(), torch.tensor([2.5 * least]).double(), FORMATS["float32"])
    far = torch.tensor([-math.inf, 1.0, 70000.0, 1e6]), torch.tensor([1.0, math.inf, 1e6, math.inf])
    assert may_swap(*far, FORMATS["float16"]).tolist() == [False, False, True, True]


def test_last_places_by_hand():
    kind = FORMATS["float32"]
    difference = torch.tensor([1.0, 2.0**-149, math.inf, math.nan, 0.0], dtype=torch.float64)
    score = torch.tensor([1.5, 0.0, math.inf, math.nan, 2.0], dtype=torch.float64)
    found = last_places(difference, score, kind).tolist()
    assert found[:3] == [2.0**23, 1.0, math.inf]
    assert math.isnan(found[3])
    assert found[4] == 0


def test_names():
    assert number_format("torch.bfloat16") is number_format("bf16") is FORMATS["bfloat16"]
    with pytest.raises(InputError, match=r"Unknown number format 'int8'"):
        number_format("int8")
