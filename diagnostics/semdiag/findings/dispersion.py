"""The machine-readable findings of each command."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from semdiag.findings.strict_json import json_ready
from semdiag.findings.theory_summaries import bounds_summary, stability_summary
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles

Summary = dict[str, Any]


def dispersion_summary(measurements: Measurements) -> Summary:
    """Percentiles of δ per layer and head, and pooled; with counterfactual columns also δ_h(k) and the mass kept.

    Args:
        measurements: of one or more models.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.dispersion/1``; null where a number is undefined.
    """

    def describe(rows: pd.DataFrame, loads: pd.DataFrame, suffix: str) -> Summary:
        found = _without(percentiles(rows["dispersion" + suffix]), "not_positive")
        if suffix and "mass" + suffix in rows:
            found["mass"] = _without(percentiles(rows["mass" + suffix]), "not_positive")
        return found

    return _summary("dispersion", measurements, describe)


def separation_summary(measurements: Measurements) -> Summary:
    """Percentiles of Δ and of the raw key loads per layer and head, and pooled.

    Args:
        measurements: of one or more models.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.separation/1``; null where a number is undefined.
    """

    def describe(rows: pd.DataFrame, loads: pd.DataFrame, suffix: str) -> Summary:
        load = _without(percentiles(loads["load" + suffix]), "not_positive", "undefined")
        load["keys"] = load.pop("queries")
        return {"separation": percentiles(rows["separation" + suffix]), "load": load}

    return _summary("separation", measurements, describe)


def capture_summary(own: Measurements) -> Summary:
    """How much of a model's attention was seen: modules found and captured, residual, what was skipped and why.

    Args:
        own: measurements of one model.
    """
    row = own.models.iloc[0]
    found, captured = int(row["attention_found"]), int(row["attention_captured"])
    listed = {name: getattr(own, name).drop(columns="model").to_dict("records") for name in ("skipped", "remarks")}
    return {"found": found, "captured": captured, "residual": float(row["residual"]), **listed}


def counterfactual_ks(queries: pd.DataFrame) -> list[int]:
    """Numbers of heavy hitters for which a model's table has counterfactual columns."""
    prefix = "dispersion_k"
    named = [str(column) for column in queries if str(column).startswith(prefix)]
    return [int(name.removeprefix(prefix)) for name in named if queries[name].notna().any()]


def _summary(
    command: str, measurements: Measurements, describe: Callable[[pd.DataFrame, pd.DataFrame, str], Summary]
) -> Summary:
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        result = {key: row[key] for key in ("model", "sha256", "task", "attention", "k", "epoch")}
        result |= {"unit": "nats", **_layers(own, describe, ""), "capture": capture_summary(own)}
        within = [{"k": k, **_layers(own, describe, f"_k{k}")} for k in counterfactual_ks(own.queries)]
        if within:
            result["within_model"] = within
        results.append(result)
    ready = {"schema": f"semdiag.{command}/1", "provenance": measurements.provenance, "results": results}
    return {key: json_ready(value) for key, value in ready.items()}


def _layers(
    own: Measurements, describe: Callable[[pd.DataFrame, pd.DataFrame, str], Summary], suffix: str
) -> Summary:
    layers = []
    for layer, head in sorted({*zip(own.queries["layer"], own.queries["head"], strict=True)}):
        rows, loads = (t[(t["layer"] == layer) & (t["head"] == head)] for t in (own.queries, own.loads))
        layers.append({"layer": int(layer), "head": int(head), **describe(rows, loads, suffix)})
    return {"layers": layers, "all": describe(own.queries, own.loads, suffix)}


def _without(table: Summary, *names: str) -> Summary:
    return {key: value for key, value in table.items() if key not in names}


SUMMARIES: dict[str, Callable[[Measurements], Summary]] = {
    "dispersion": dispersion_summary,
    "separation": separation_summary,
    "stability": stability_summary,
    "bounds": bounds_summary,
}
