"""The machine-readable findings of ``semdiag stability`` and ``semdiag bounds``."""

from typing import Any

import numpy as np
import pandas as pd

from semdiag.findings.bounds import parameter_findings
from semdiag.findings.consequences import consequence_findings
from semdiag.findings.corollary import corollary_findings
from semdiag.findings.finding import Finding
from semdiag.findings.pairing import compared_pairs, differences
from semdiag.findings.stability import stability_findings
from semdiag.findings.strict_json import json_ready
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probes.noise.softmax_bounds import local_stability, with_bounds

Summary = dict[str, Any]
SCOPE = (
    "The largest over the evaluated inputs at this checkpoint: a bound speaks about these inputs and parameters, "
    "and about no others. Heavy-hitter masks: sums over a token's queries are doubled, for the union of two masks."
)
_FACTS = ("model", "sha256", "task", "attention", "k", "epoch")


def stability_summary(measurements: Measurements) -> Summary:
    """Percentiles of the local constant, secants, response and both forms of ξ, per layer and head and pooled.

    Args:
        measurements: of one or more models, with secants.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.stability/1``; null where a number is undefined or infinite.
    """
    findings = stability_findings(measurements)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        secants = with_bounds(own.secants, str(row["attention"]))
        layers = []
        for layer, head in sorted({*zip(own.queries["layer"], own.queries["head"], strict=True)}):
            parts = (t[(t["layer"] == layer) & (t["head"] == head)] for t in (own.queries, secants))
            layers.append({"layer": int(layer), "head": int(head), **_describe(*parts)})
        result = {key: row[key] for key in _FACTS} | {"unit": "per nat", "layers": layers}
        result |= {"all": _describe(own.queries, secants), "verdicts": verdicts_of(findings, row["model"])}
        results.append(result)
    return _ready("stability", measurements, {"results": results})


def bounds_summary(measurements: Measurements) -> Summary:
    """Constants, bounds and slopes of every model, and what Corollary 1 says about every pair.

    Args:
        measurements: of one or more models, with constants and parameters.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.bounds/1``; null where a number is undefined or infinite.
    """
    pairs = compared_pairs(measurements)
    of_models = parameter_findings(measurements)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        tables = {
            name: getattr(own, name).drop(columns="model").to_dict("records")
            for name in ("constants", "parameters")
        }
        result = {key: row[key] for key in _FACTS} | {"unit": "natural logarithm", **tables}
        results.append(result | {"verdicts": verdicts_of(of_models, row["model"])})
    compared = [
        {
            "label": pair.label,
            "reference": pair.full,
            "other": pair.other,
            "differences": differences(measurements.models, pair),
            "verdicts": verdicts_of(
                corollary_findings(measurements, [pair]) + consequence_findings(measurements, [pair]), pair.label
            ),
        }
        for pair in pairs
    ]
    return _ready("bounds", measurements, {"scope": SCOPE, "results": results, "pairs": compared})


def _describe(queries: pd.DataFrame, secants: pd.DataFrame) -> Summary:
    """Percentiles over the queries; bounds as natural logarithms."""
    described: Summary = {"local": _percentiles(local_stability(queries))}
    if secants.empty:
        return described
    described |= {
        "secant": _percentiles(secants["secant"]),
        "response": [
            {"noise": float(str(level)), **_percentiles(rows["weight_change"])}
            for level, rows in secants.groupby("level")
        ],
        "ln_sound": _percentiles(secants["ln_sound"]),
        "ln_paper": _percentiles(secants["ln_paper"]),
        "same_set": float(secants["same_set"].mean()),
    }
    return described


def _percentiles(values: "pd.Series[float]") -> Summary:
    table = percentiles(values.to_numpy(np.float64))
    return {key: value for key, value in table.items() if key != "not_positive"}


def verdicts_of(findings: list[Finding], subject: str) -> list[Summary]:
    """What became of the claims about a model or a pair, as plain values.

    Args:
        findings: of any subjects.
        subject: a model's path, or a pair's label.
    """
    return [
        {
            "claim": f.claim,
            "form": f.form,
            "where": f.where,
            "verdict": f.verdict.value,
            "numbers": {name: float(value) for name, value in f.numbers.items()},
            "note": f.note,
        }
        for f in findings
        if f.subject == subject
    ]


def _ready(command: str, measurements: Measurements, content: Summary) -> Summary:
    ready = {"schema": f"semdiag.{command}/1", "provenance": measurements.provenance, **content}
    return {key: json_ready(value) for key, value in ready.items()}
