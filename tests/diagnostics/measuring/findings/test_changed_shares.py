"""Shares of changed choices, and intervals that claim no more than the sequences show."""

import math

import pandas as pd
import pytest

from semdiag.measuring.findings.changed_shares import changed_shares


def counts(forecast, measured):
    """Ten choices of each sequence."""
    rows = {"sample": range(len(measured)), "queries": 10, "forecast": forecast, "measured": measured, "first": 0}
    return pd.DataFrame(rows)


@pytest.mark.parametrize("changed", [0, 10])
def test_sequences_that_are_all_alike_have_no_interval(changed):
    """It was 0% (0 to 0%) of other texts, after six."""
    found = changed_shares(counts([float(changed)] * 6, [changed] * 6))
    assert (found["forecast"], found["measured"]) == (changed / 10, changed / 10)
    assert all(math.isnan(found[f"{name}_{end}"]) for name in ("forecast", "measured") for end in ("low", "high"))


def test_sequences_that_differ_have_one_that_holds_their_share():
    found = changed_shares(counts([1.0, 2, 3, 2, 1, 3], [0, 0, 0, 0, 0, 4]))
    assert (found["forecast"], found["measured"]) == pytest.approx((0.2, 4 / 60))
    assert 0 <= found["measured_low"] < found["measured"] < found["measured_high"] <= 1
    assert found["forecast_low"] < found["forecast"] < found["forecast_high"]
