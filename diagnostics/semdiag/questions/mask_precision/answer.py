"""What a number format does to masks: by model, format and layer, and pooled."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.findings.resampling import sum_ratio_interval
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted
from semdiag.presenting.section import Answer, Glance, percent_span

_SHARES = ("changed", "tied", "changed_or_tied", "certified")
_COUNTS = ("queries", "not_covered", "certified_rows", "certified_changed")
_COLUMNS = [
    "model", "format", "layer", *_COUNTS, *(name + end for name in _SHARES for end in ("", "_low", "_high")),
    "lost_p50", "lost_mean", "why",
]  # fmt: skip


def precision_table(findings: Findings) -> pd.DataFrame:
    """Return how many masks survive, by model, number format and layer, and pooled; heads are pooled."""
    masks, lost = findings.measurements.rounded_masks, findings.measurements.lost_weights
    rows = []
    for (model, kind), rows_of_format in masks.groupby(["model", "format"], sort=False):
        of_changed = lost[(lost["model"] == model) & (lost["format"] == kind)]
        for layer, part in _layers(rows_of_format):
            weights = of_changed if layer == ALL else of_changed[of_changed["layer"] == layer]
            rows.append({"model": model, "format": kind, "layer": layer, **_described(part, weights["lost"])})
    return pd.DataFrame(rows, columns=_COLUMNS)


def precision_of(findings: Findings, model: str) -> list[Summary]:
    """Return what each number format does to a model's masks, as in ``--json``."""
    table = findings(precision_table)
    of_model = table[table["model"] == model]
    formats: list[Summary] = []
    for kind, rows in of_model.groupby("format", sort=False):
        entries = records(rows.drop(columns=["model", "format"]).astype({"layer": object}))
        formats.append({"format": kind, "layers": entries[:-1], "all": entries[-1] | {"layer": "all"}})
    return formats


def _layers(rows: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame]]:
    for layer, part in rows.groupby("layer", sort=True):
        yield int(str(layer)), part
    yield ALL, rows


def _described(part: pd.DataFrame, lost: "pd.Series[float]") -> dict[str, Any]:
    counts = part.groupby("sample")[["queries", "not_covered", *_SHARES]].sum().astype(np.float64)
    covered = (counts["queries"] - counts["not_covered"]).to_numpy()
    estimates: dict[str, float] = {}
    for name in _SHARES:
        share = sum_ratio_interval(counts[name].to_numpy(), covered, share=True).if_varied()
        estimates |= share.columns(name)
    return {
        "queries": int(part["queries"].sum()),
        "not_covered": int(part["not_covered"].sum()),
        "certified_rows": int(part["certified"].sum()),
        "certified_changed": int(part["certified_changed"].sum()),
        **estimates,
        "lost_p50": float(lost.median()),
        "lost_mean": float(lost.mean()),
        "why": "; ".join(sorted({*part["why"]} - {""})),
    }


def precision_glance(findings: Findings) -> Glance:
    """Return how many masks change in the format that was named first."""
    table = findings(precision_table)
    rows = table[(table["layer"] == ALL) & table["changed"].notna()]
    if rows.empty:
        return Glance(Answer.OPEN, "0 models", "have a mask that the error model covers")
    first = rows["format"].iloc[0]
    rows = rows[rows["format"] == first]
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    return Glance(
        Answer.MEASURED,
        percent_span(list(rows["changed"])),
        f"of the masks of {counted(len(rows), 'model')} change in {first}, however ties are broken; {changed:,} "
        f"of {certified:,} certified ones changed",
    )
