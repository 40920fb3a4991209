"""How many choices a number format changes, forecast and measured, each with an interval."""

import math

import numpy as np
import pandas as pd

from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.measuring.findings.strict_json import Summary

_MISSED = 0.1  # of its size, by which a forecast may miss beyond the spread of sequences (theory.md)


def changed_shares(counts: pd.DataFrame) -> Summary:
    """Return how many choices change where a model runs in a format throughout.

    Args:
        counts: sample, queries (that choose), forecast and measured (how many of them choose otherwise), first.

    Returns:
        queries; forecast and measured, the shares of these, with ``_low`` and ``_high`` of 95% intervals
        over sequences (none where all are alike), that of the forecast wider by a tenth of its ends; first:
        of how many queries the first change is here.
    """
    own = counts.groupby("sample")[["queries", "forecast", "measured"]].sum().astype(np.float64)
    row: Summary = {"queries": int(counts["queries"].sum())}
    for name, missed in (("forecast", _MISSED), ("measured", 0.0)):
        found = sum_ratio_interval(own[name].to_numpy(), own["queries"].to_numpy(), share=True).if_varied()
        low, high = found.low * (1 - missed), found.high * (1 + missed)
        high = high if math.isnan(high) else min(1.0, high)
        row |= {name: found.estimate, f"{name}_low": low, f"{name}_high": high}
    return row | {"first": int(counts["first"].sum())}
