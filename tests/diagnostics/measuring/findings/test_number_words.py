"""Shares near 0 and 1 do not read as none and all."""

import pytest

from semdiag.measuring.findings.findings import percent
from semdiag.presenting.section import span_words


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
    assert (percent(share), percent(share, 1)) == (whole, tenths)


@pytest.mark.parametrize(
    ("values", "said"),
    [([0.5], "50"), ([0.5, 0.98], "50–98"), ([-0.03, 0.98], "−3 to 98"), ([0.85, 0.9999], "85 to > 99.9")],
)
def test_a_span_with_signs_is_told_with_a_word(values, said):
    assert span_words(values, percent) == said
