"""What masks change by length of the text, and by place in it."""

import math
from typing import Any, cast

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.questions.k_sweep.answer.rerun import change_interval, tolerance_of
from semdiag.questions.k_sweep.measure.kinds import KINDS
from semdiag.questions.k_sweep.measure.passes import NO_MASK
from semdiag.questions.k_sweep.measure.quarters import QUARTERS

WHOLE = 0  # in the column quarter: all positions
_COLUMNS = ("model", "length", "mask", "k", "quarter", "samples", "measure", "change", "low", "high", "kept")


def quarter_table(findings: Findings) -> pd.DataFrame:
    """Return the mean change of the loss by length, mask and quarter of the text, with 95% intervals over samples."""
    rows: list[dict[str, Any]] = []
    for place, own in findings.measurements.rerun_quarters.groupby(["model", "length"], sort=False):
        model, length = cast("tuple[str, int]", place)
        measure, unit = ("loss", "targets") if own["targets"].sum() else ("divergence", "predictions")
        parts = own.pivot_table(
            index=["mask", "k", "sample"], columns="quarter", values=[measure, unit], aggfunc="sum"
        )
        parts = parts.astype(np.float64)
        base = parts.loc[NO_MASK].droplevel("k")
        kept = own.groupby(["mask", "k"])[["kept", "keys"]].sum()
        for mask, k in kept.index:
            if mask == NO_MASK:
                continue
            these = parts.loc[mask, k]
            before = base.loc[these.index]
            common = {"model": model, "length": length, "mask": mask, "k": int(k), "samples": len(these)}
            common |= {"measure": measure, "kept": float(kept["kept"][mask, k] / kept["keys"][mask, k])}
            for quarter in (WHOLE, *range(1, QUARTERS + 1)):
                at = list(range(1, QUARTERS + 1)) if quarter == WHOLE else [quarter]
                sums = (these[measure][at] - before[measure][at]).sum(axis=1)
                counts = these[unit][at].sum(axis=1)
                interval = change_interval(sums.to_numpy(), counts.to_numpy(), tolerance_of(findings, measure))
                rows.append(
                    {
                        **common,
                        "quarter": quarter,
                        "change": interval.estimate,
                        "low": interval.low,
                        "high": interval.high,
                    }
                )
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def smallest_enough(findings: Findings, model: str) -> pd.DataFrame:
    """By length and kind of mask the smallest k that was run from which on the mean change is tolerated."""
    table = findings(quarter_table)
    own = table[(table["model"] == model) & (table["length"] > 0) & (table["quarter"] == WHOLE)]
    rows = []
    for place, these in own[own["mask"].isin(KINDS)].groupby(["length", "mask"], sort=False):
        length, mask = cast("tuple[int, str]", place)
        limit, smallest = tolerance_of(findings, str(these["measure"].iloc[0])), None
        for row in these.sort_values("k", ascending=False).to_dict("records"):
            if not row["change"] <= limit:
                break
            smallest = row
        kept = math.nan if smallest is None else smallest["kept"]
        k = None if smallest is None else int(smallest["k"])
        rows.append({"length": length, "mask": mask, "k": k, "kept": kept, "largest": int(these["k"].max())})
    return pd.DataFrame(rows, columns=["length", "mask", "k", "kept", "largest"]).astype({"k": "Int64"})
