"""Percentiles by layer and head and pooled, and for every counterfactual k, as plain values."""

from collections.abc import Callable
from functools import partial

from semdiag.measuring.findings.counterfactuals import counterfactual_ks
from semdiag.measuring.findings.distributions import place_percentiles
from semdiag.measuring.findings.divergence import Place
from semdiag.measuring.findings.estimates import estimates_of
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.table import ALL
from semdiag.measuring.tables import RESIDUALS

Percentile = Callable[[str], Summary]  # of a column of the queries or loads, for one layer and head
Describe = Callable[[Percentile, str], Summary]


def by_layer(command: str, findings: Findings, describe: Describe) -> Summary:
    """Return the numbers of every model by layer and head and pooled, also for every counterfactual k."""
    measurements = findings.measurements
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        result = {key: row[key] for key in MODEL_FACTS}
        layers = partial(_layers, findings, row["model"], describe)
        result |= {"unit": "nats", **layers(""), **estimates_of(findings, row["model"]), "capture": _capture(own)}
        within = [{"k": k, **layers(f"_k{k}")} for k in counterfactual_ks(own.queries)]
        if within:
            result["within_model"] = within
        results.append(result)
    return json_object(command, findings, results=results)


def _layers(findings: Findings, model: str, describe: Describe, suffix: str) -> Summary:
    def of(place: Place, column: str) -> Summary:
        return findings(place_percentiles, model, column)[place]

    places = [place for place in findings(place_percentiles, model, "dispersion") if ALL not in place]
    layers = [{"layer": at[0], "head": at[1], **describe(partial(of, at), suffix)} for at in places]
    return {"layers": layers, "all": describe(partial(of, (ALL, ALL)), suffix)}


def without(table: Summary, *names: str) -> Summary:
    """Return a table of numbers without some of them."""
    return {key: value for key, value in table.items() if key not in names}


def _capture(own: Measurements) -> Summary:
    """Return how complete the capture was: modules found and captured, residual, skipped operations, remarks."""
    row = own.models.iloc[0]
    found, captured = int(row["attention_found"]), int(row["attention_captured"])
    listed = {name: getattr(own, name).drop(columns="model").to_dict("records") for name in ("skipped", "remarks")}
    return {"found": found, "captured": captured, **{name: float(row[name]) for name in RESIDUALS}, **listed}
