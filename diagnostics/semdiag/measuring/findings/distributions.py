"""Percentiles over queries and keys of every model: pooled, by layer, and by layer and head."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.divergence import Place, broken_places
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.percentiles import percentiles, pooled_table
from semdiag.measuring.table import ALL, rows_of

Percentiles = dict[str, float | int]


def _rows(findings: Findings, quantity: str) -> pd.DataFrame:
    measurements = findings.measurements
    return measurements.loads if quantity.startswith("load") else measurements.queries


def places_of(rows: pd.DataFrame) -> list[tuple[Place, NDArray[np.intp]]]:
    """Return the layers and heads of a table, sorted, each with the positions of its rows."""
    indices: dict[Any, Any] = rows.groupby(["layer", "head"]).indices
    return [((int(layer), int(head)), indices[layer, head]) for layer, head in sorted(indices)]


def place_percentiles(findings: Findings, model: str, quantity: str) -> dict[Place, Percentiles]:
    """Return percentiles of a quantity of one model for every layer and head, and pooled: ``(ALL, ALL)``."""
    broken = broken_places(findings, model)
    table = _place_percentiles(findings, model, quantity)
    return {place: _unknown(row) if place in broken else row for place, row in table.items()}


def known_rows(findings: Findings, model: str, quantity: str, layer: int = ALL) -> pd.DataFrame:
    """Return the rows behind percentiles, intervals and verdicts on a model, or on one of its layers."""
    rows = rows_of(_rows(findings, quantity), model)
    rows = rows.loc[slice(None) if layer == ALL else rows["layer"] == layer, ["sample", quantity]]
    return rows.assign(**{quantity: np.nan}) if (layer, ALL) in broken_places(findings, model) else rows


def _unknown(row: Percentiles) -> Percentiles:
    """Return percentiles of the same number of queries, all undefined."""
    return {**percentiles([]), "queries": row["queries"], "undefined": row["queries"]}


def _place_percentiles(findings: Findings, model: str, quantity: str) -> dict[Place, Percentiles]:
    sketches = findings.measurements.sketches
    own = sketches[(sketches["model"] == model) & (sketches["quantity"] == quantity)]
    if len(own):
        known = {place: own.iloc[at[0]] for place, at in places_of(own)}
        ordered = sorted(known, key=lambda place: (place[0] == ALL, place[0], place[1] == ALL, place[1]))
        return {place: known[place][list(percentiles([]))].to_dict() for place in ordered}
    rows = rows_of(_rows(findings, quantity), model)
    values = rows[quantity].to_numpy(np.float64)
    table = {place: percentiles(values[at]) for place, at in places_of(rows)}
    return table | {(ALL, ALL): percentiles(values)}


def pooled_percentiles(findings: Findings, quantity: str) -> dict[str, Percentiles]:
    """Return percentiles of a quantity over all layers and heads."""
    models = _rows(findings, quantity)["model"].unique()
    return {str(model): findings(place_percentiles, str(model), quantity)[ALL, ALL] for model in models}


def layer_percentiles(findings: Findings, quantity: str) -> dict[str, pd.DataFrame]:
    """Return percentiles of a quantity in every layer, heads pooled."""
    tables = {}
    for model, rows in _rows(findings, quantity).groupby("model", sort=False):
        places = findings(place_percentiles, str(model), quantity).items()
        sketched = [{"layer": layer, **row} for (layer, head), row in places if head == ALL != layer]
        table = pd.DataFrame(sketched) if sketched else pooled_table(rows, quantity, by="layer")
        broken = {layer for layer, head in broken_places(findings, str(model)) if head == ALL}
        layers = records(table.sort_values("layer"))
        tables[str(model)] = pd.DataFrame({**r, **_unknown(r)} if r["layer"] in broken else r for r in layers)
    return tables


def percentile_table(findings: Findings, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity per layer and head, and pooled, of every model."""
    models = [str(model) for model in findings.measurements.models["model"]]
    return pd.DataFrame({"model": model, **row} for model in models for row in _places(findings, model, quantity))


def within_table(findings: Findings) -> pd.DataFrame:
    """Return percentiles of what every counterfactual k would keep, by layer and head and pooled, by model."""
    table: list[dict[Any, Any]] = []
    for model in findings.measurements.models["model"]:
        own = findings.measurements.of(model)
        for k in counterfactual_ks(own.queries):
            for quantity in ("dispersion", "separation", "mass", "load"):
                rows, column = own.loads if quantity == "load" else own.queries, f"{quantity}_k{k}"
                if column in rows:
                    place = {"model": model, "quantity": quantity, "k": k}
                    table += [{**place, **row} for row in _places(findings, str(model), column)]
    return pd.DataFrame(table)


def _places(findings: Findings, model: str, column: str) -> list[dict[Any, Any]]:
    """Return one row per layer and head, then one for all together."""
    return [
        {"layer": layer, "head": head, **row}
        for (layer, head), row in findings(place_percentiles, model, column).items()
        if (layer == ALL) == (head == ALL)
    ]


def all_by_name(table: pd.DataFrame) -> pd.DataFrame:
    """Replace ALL by ``all`` in the columns layer and head, for readers."""
    named = {name: table[name].astype(object).mask(table[name] == ALL, "all") for name in ("layer", "head")}
    return table.assign(**named)
