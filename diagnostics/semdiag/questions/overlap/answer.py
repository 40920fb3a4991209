"""Do layers, heads and successive queries keep the same keys? Jaccard indices with intervals, beside chance."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.resampling import mean_interval
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.measuring.table import ALL

_COLUMNS = [
    "model", "what", "layer", "other_layer", "pairs", "queries", "samples", "jaccard", "low", "high", "chance",
]  # fmt: skip


def overlap_table(findings: Findings) -> pd.DataFrame:
    """Return the mean Jaccard index between layers, between heads of a layer, and between successive queries."""
    rows = [
        {"model": model, **row}
        for model, pairs in findings.measurements.overlap.groupby("model", sort=False)
        for row in _of_model(pairs)
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)


def _of_model(pairs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    pair = pairs["kind"] == "pair"
    same = pairs["layer"] == pairs["other_layer"]
    parts = {"layers": pairs[pair & ~same], "heads": pairs[pair & same], "previous": pairs[~pair]}
    for what, rows in parts.items():
        if rows.empty:
            continue
        yield _described(what, ALL, ALL, rows)
        for (layer, other), part in rows.groupby(["layer", "other_layer"], sort=True):
            yield _described(what, int(str(layer)), int(str(other)), part)


def _described(what: str, layer: int, other: int, rows: pd.DataFrame) -> dict[str, Any]:
    interval = mean_interval(rows, "jaccard").if_varied()
    places = ["layer", "head", "other_layer", "other_head"]
    return {
        "what": what, "layer": layer, "other_layer": other, "pairs": len(rows[places].drop_duplicates()),
        "queries": int(rows["queries"].sum()), "samples": rows["sample"].nunique(), "jaccard": interval.estimate,
        "low": interval.low, "high": interval.high, "chance": float(rows["chance"].mean()),
    }  # fmt: skip


def overlap_summary(findings: Findings) -> Summary:
    """Return the overlap of every model's masks."""
    table = findings(overlap_table)
    results = []
    for row in findings.measurements.models.to_dict("records"):
        of_model = table[table["model"] == row["model"]].drop(columns="model")
        results.append({key: row[key] for key in MODEL_FACTS} | {"overlap": of_model.to_dict("records")})
    return json_object("overlap", findings, k=findings.measurements.provenance.get("overlap_k"), results=results)
