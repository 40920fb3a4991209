"""Do layers, heads and successive queries keep the same keys? Jaccard indices with intervals, beside chance."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import MODEL_FACTS, Findings, Summary, json_object
from semdiag.measuring.findings.resampling import mean_interval
from semdiag.measuring.table import ALL
from semdiag.measuring.words import interval
from semdiag.presenting.question import title
from semdiag.presenting.section import NEVER, Column, NumberTable, text, three_decimals, wide_console

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


def _layer(layer: int) -> str:
    return "all" if layer == ALL else str(layer)


_interval = partial(interval, form=three_decimals, unknown="no interval")
_TERMINAL_COLUMNS = (
    Column("what", "between", text), Column("layer", form=_layer), Column("other_layer", "and layer", _layer),
    Column("pairs", drop=1), Column("jaccard", "index", three_decimals, drop=NEVER),
    Column("low high", "95%", _interval, drop=2), Column("chance", "at random", three_decimals, drop=NEVER),
)  # fmt: skip


def print_overlap(findings: Findings) -> None:
    """Print a table per model, or why there is none."""
    console, remarks = wide_console(), findings.measurements.remarks
    for result in findings(overlap_summary)["results"]:
        if result["overlap"]:
            console.print(f"\n{title(result)}: Jaccard index of kept keys")
            console.print(NumberTable(_TERMINAL_COLUMNS, result["overlap"]))
        else:
            reasons = remarks.loc[
                (remarks["model"] == result["model"]) & (remarks["code"] == "no-overlap"), "text"
            ]
            reason = next(iter(reasons), "no two masks to compare (a query that drops no key has none)")
            console.print(f"\n{title(result)}: {reason}")
