"""Percentiles by layer and head and pooled, within a model and for every counterfactual k, as plain values."""

from collections.abc import Callable

import pandas as pd

from semdiag.findings.capture import capture_summary
from semdiag.findings.counterfactuals import counterfactual_ks
from semdiag.findings.findings import Findings
from semdiag.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.measurement.measurements import Measurements

Describe = Callable[[pd.DataFrame, pd.DataFrame, str], Summary]


def by_layer(command: str, findings: Findings, describe: Describe) -> Summary:
    """Numbers of every model by layer and head and pooled; likewise for every counterfactual k.

    Args:
        command: whose object this is.
        findings: of one or more models.
        describe: from queries, loads and the suffix of the counterfactual's columns to numbers.
    """
    measurements = findings.measurements
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        result = {key: row[key] for key in MODEL_FACTS}
        result |= {"unit": "nats", **_layers(own, describe, ""), "capture": capture_summary(own)}
        within = [{"k": k, **_layers(own, describe, f"_k{k}")} for k in counterfactual_ks(own.queries)]
        if within:
            result["within_model"] = within
        results.append(result)
    return json_object(command, findings, results=results)


def _layers(own: Measurements, describe: Describe, suffix: str) -> Summary:
    layers = []
    for layer, head in sorted({*zip(own.queries["layer"], own.queries["head"], strict=True)}):
        rows, loads = (t[(t["layer"] == layer) & (t["head"] == head)] for t in (own.queries, own.loads))
        layers.append({"layer": int(layer), "head": int(head), **describe(rows, loads, suffix)})
    return {"layers": layers, "all": describe(own.queries, own.loads, suffix)}


def without(table: Summary, *names: str) -> Summary:
    """A table of numbers without some of them."""
    return {key: value for key, value in table.items() if key not in names}
