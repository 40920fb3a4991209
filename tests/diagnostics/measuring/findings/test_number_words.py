"""Shares near 0 and 1 do not read as none and all."""

import math

import pytest

from semdiag.measuring.words import (
    interval,
    interval_words,
    limit_of_share,
    number,
    percent,
    percent_span,
)


@pytest.mark.parametrize(
    ("share", "whole", "tenths"),
    [
        (0, "0", "0.0"),
        (1e-9, "< 0.1", "< 0.1"),
        (0.0006, "0.1", "0.1"),
        (0.853, "85", "85.3"),
        (0.9994, "99.9", "99.9"),
        (0.9999, "> 99.9", "> 99.9"),
        (1, "100", "100.0"),
    ],
)
def test_only_none_and_all_read_as_0_and_100(share, whole, tenths):
    assert (percent(share, ".0f", strict=True), percent(share, strict=True)) == (f"{whole}%", f"{tenths}%")


@pytest.mark.parametrize(("high", "said"), [(1.0, "100%"), (0.9999, "> 99.9%"), (0.123, "12.3%")])
def test_a_limit_is_told_as_one(high, said):
    assert limit_of_share(high) == f"up to {said} of inputs may (one-sided 95%)"


@pytest.mark.parametrize(
    ("values", "said"),
    [([0.5], "50"), ([0.5, 0.98], "50–98"), ([-0.03, 0.98], "−3 to 98"), ([0.85, 0.9999], "85 to > 99.9")],
)
def test_a_span_with_signs_is_told_with_a_word(values, said):
    assert percent_span(values) == f"{said}%"


@pytest.mark.parametrize(
    ("samples", "said"), [(None, "no interval"), (4, "4 samples: too few for an interval"), (5, "no interval")]
)
def test_an_interval_that_is_not_known_has_a_reason(samples, said):
    for ends in ((math.nan, 1.0), (0.0, math.nan)):
        assert interval_words(*ends, samples=samples) == said
    assert interval_words(0.125, 2, samples=samples) == "95% interval 0.12 to 2.00"
    assert interval_words(-1, math.inf, number, samples, level="") == "-1 to inf"


def test_each_kind_of_an_interval_by_hand():
    assert interval(None, 1) == "–"
    assert interval(0.9, None, unknown="none") == "none"
    assert interval(0.926, 0.931, factor=100) == "92.6–93.1"
    assert interval("-inf", 3, between=" … ") == "-inf … 3"


def test_thousands_are_written_without_an_exponent():
    """1,053.2 was "1.05e+03"."""
    assert [number(x) for x in (1053.2, -1e6 / 3, 999.6, 1e12 / 3, 1000)] == [
        "1,050", "-333,000", "1,000", "3.33e+11", "1000",
    ]  # fmt: skip
