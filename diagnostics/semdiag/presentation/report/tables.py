"""The tables of a report: percentiles as CSV, one row per model, and the summary as plain JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from semdiag.findings.convergence import epochs_to
from semdiag.findings.dispersion import counterfactual_ks, dispersion_summary, separation_summary
from semdiag.findings.finding import Finding
from semdiag.findings.strict_json import json_ready
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import layer_table, percentiles
from semdiag.presentation.drawing.panels import attention_label
from semdiag.presentation.report.verdict import PairVerdict
from semdiag.presentation.sections.bounds.tables import findings_table

SCHEMA = "semdiag.report/1"
_FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]


def percentile_table(measurements: Measurements, quantity: str) -> pd.DataFrame:
    """Percentiles of a quantity per layer and head, and pooled, of every model.

    Args:
        measurements: of any number of models.
        quantity: dispersion, separation or load.

    Returns:
        The model's facts, layer and head (``all`` where pooled), then the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    rows = measurements.loads if quantity == "load" else measurements.queries
    table: list[dict[Any, Any]] = []
    for model in measurements.models[_FACTS].to_dict("records"):
        own = rows[rows["model"] == model["model"]]
        table += [{**model, **row} for row in layer_table(own, quantity).to_dict("records")]
        table.append({**model, "layer": "all", "head": "all", **percentiles(own[quantity])})
    return pd.DataFrame(table)


def within_table(measurements: Measurements) -> pd.DataFrame:
    """Percentiles of what every counterfactual k would leave, per layer and head, and pooled, of every model.

    Args:
        measurements: of any number of models.

    Returns:
        Columns model, quantity (dispersion, separation, mass or load), k, layer and head (``all`` where pooled),
        then those of :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    table: list[dict[Any, Any]] = []
    for model in measurements.models["model"]:
        own = measurements.of(model)
        for k in counterfactual_ks(own.queries):
            for quantity in ("dispersion", "separation", "mass", "load"):
                rows, column = own.loads if quantity == "load" else own.queries, f"{quantity}_k{k}"
                if column in rows:
                    place = {"model": model, "quantity": quantity, "k": k}
                    table += [{**place, **row} for row in layer_table(rows, column).to_dict("records")]
                    table.append({**place, "layer": "all", "head": "all", **percentiles(rows[column])})
    return pd.DataFrame(table)


def write_tables(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Write tables as CSV files.

    Args:
        tables: by file name without suffix.
        folder: made if absent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")


def model_rows(measurements: Measurements, verdicts: Sequence[PairVerdict], sections: Sequence[str]) -> Any:
    """One row per model: what is known of it and what was measured.

    Args:
        measurements: of any number of models.
        verdicts: from :func:`~semdiag.presentation.report.verdict.pair_verdicts`.
        sections: of the report; the dispersion stands in every report.

    Returns:
        JSON-ready dictionaries: the model's facts, ``epochs_to_95`` % training accuracy, ``smaller`` (whether
        δ_h < δ_s, where it is the top-k half of a pair), ``capture`` (what was seen of its attention, layer by
        layer), ``dispersion`` and ``separation`` as in the summaries of the commands with these names.
    """
    answers = {verdict.gate.pair.other: verdict.answer for verdict in verdicts}
    parts = {"dispersion": dispersion_summary(measurements)["results"]}
    if "separation" in sections:
        parts["separation"] = separation_summary(measurements)["results"]
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
    measurements: Measurements,
    command: str,
    said: list[str],
    verdicts: Sequence[PairVerdict],
    sections: Sequence[str],
    figures: dict[str, list[str]],
    findings: Mapping[str, Sequence[Finding]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The report as plain values.

    Args:
        measurements: of any number of models.
        command: that made the report.
        said: the verdict in words.
        verdicts: of :func:`~semdiag.presentation.report.verdict.pair_verdicts`.
        sections: of the report.
        figures: files by figure, relative to the report.
        findings: of the theory, by section; the key ``findings`` is there only if some are given.

    Returns:
        A dictionary for JSON: no NaN or infinity, null instead.
    """
    whole: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "provenance": json_ready(measurements.provenance),
        "verdict": said,
        "pairs": json_ready([verdict.to_dict() for verdict in verdicts]),
        "results": model_rows(measurements, verdicts, sections),
        "figures": figures,
    }
    if findings:
        listed = {name: findings_table(own).to_dict("records") for name, own in findings.items()}
        whole["findings"] = json_ready(listed)
    return whole
