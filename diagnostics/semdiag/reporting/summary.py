"""The summary of a report as plain values: the verdict, a row per model, the verdicts on claims."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import json_ready, schema
from semdiag.presenting.drawing.panels import attention_label
from semdiag.presenting.section import Section
from semdiag.presenting.tables import verdict_table
from semdiag.questions.convergence.answer.epochs import epochs_to
from semdiag.questions.dispersion.answer.comparisons import dispersion_summary, pair_comparisons
from semdiag.questions.separation.answer import separation_summary


def model_rows(findings: Findings, sections: Sequence[str]) -> Any:
    """Return one row per model: its facts and what was measured."""
    measurements = findings.measurements
    answers = {pair.gate.pair.other: pair.answer for pair in findings(pair_comparisons)}
    parts = {"dispersion": findings(dispersion_summary)["results"]}
    if "separation" in sections:
        parts["separation"] = findings(separation_summary)["results"]
    rows = []
    for place, model in enumerate(measurements.models.to_dict("records")):
        history = measurements.history[measurements.history["model"] == model["model"]]
        k = None if pd.isna(model["k"]) else int(model["k"])
        row = {
            **model,
            "attention_label": attention_label(model["attention"], k, model["global_tokens"]),
            "epochs_to_95": epochs_to(history.sort_values("epoch")),
            "smaller": answers.get(model["model"]),
        }
        layers = measurements.calls[measurements.calls["model"] == model["model"]].drop(columns="model")
        norms = measurements.projections[measurements.projections["model"] == model["model"]].groupby("layer")
        largest = norms[["gamma", "upsilon"]].max().join(norms["reason"].first()).reset_index()
        layers = layers.merge(largest, on="layer", how="left")
        row["capture"] = {**parts["dispersion"][place]["capture"], "layers": layers.to_dict("records")}
        for name, results in parts.items():
            known = (*model, "capture")
            row[name] = {key: results[place][key] for key in results[place] if key not in known}
        rows.append(row)
    return json_ready(rows)


def summary(
    findings: Findings,
    command: str,
    verdict: list[str],
    sections: Sequence[Section],
    figures: dict[str, list[str]],
) -> dict[str, Any]:
    """Return the report as plain values.

    Args:
        findings: of any number of models.
        command: that made the report.
        verdict: the verdict in words.
        sections: of the report.
        figures: files by figure, relative to the report.

    Returns:
        A dictionary for JSON, without NaN or infinity; it has the key ``findings`` only if a section judges
        claims.
    """
    content: dict[str, Any] = {
        "schema": schema("report"),
        "command": command,
        "provenance": json_ready(findings.measurements.provenance),
        "verdict": verdict,
        "glances": {
            section.name: findings(section.glance).to_dict() for section in sections if section.glance is not None
        },
        "pairs": json_ready([comparison.to_dict() for comparison in findings(pair_comparisons)]),
        "results": model_rows(findings, [section.name for section in sections]),
        "figures": figures,
    }
    judged = {section.name: verdict_table(findings(section.verdicts)) for section in sections if section.verdicts}
    if judged:
        content["findings"] = json_ready({name: table.to_dict("records") for name, table in judged.items()})
    content["details"] = {section.name: section.details(findings) for section in sections if section.details}
    return content
