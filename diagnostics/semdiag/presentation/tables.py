"""What the tables of all sections have in common."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from semdiag.findings.finding import Finding
from semdiag.findings.findings import Findings
from semdiag.measurement.percentiles import layer_table, percentiles

FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]


def with_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """A table with what is known of each model in front.

    Args:
        findings: of the models.
        table: with the column ``model``.
    """
    return findings.measurements.models[FACTS].merge(table, on="model")


def verdict_table(judged: Sequence[Finding]) -> pd.DataFrame:
    """Findings as a table, their numbers in words.

    Args:
        judged: findings of any verdict.

    Returns:
        subject, claim, form, where, verdict, numbers (``name = value; …``), note.
    """
    columns = ["subject", "claim", "form", "where", "verdict", "numbers", "note"]
    rows = []
    for f in judged:
        numbers = "; ".join(f"{name} = {value:.12g}" for name, value in f.numbers.items())
        rows.append((f.subject, f.claim, f.form, f.where, f.verdict.value, numbers, f.note))
    return pd.DataFrame(rows, columns=columns)


def with_run_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """A table with task, attention and seed of each run in front.

    Args:
        findings: with runs.
        table: with the column ``model``.
    """
    return findings.measurements.runs[["model", "task", "attention", "seed"]].merge(table, on="model")


def a_column_each(table: pd.DataFrame) -> pd.DataFrame:
    """A column for every quantity and statistic, like ``dispersion_p50``, instead of a row."""
    names = table["quantity"] + "_" + table["statistic"]
    places = [column for column in table if column not in ("quantity", "statistic", "value")]
    wide = table.assign(name=pd.Categorical(names, names.unique())).pivot(
        index=places, columns="name", values="value"
    )
    return wide.rename_axis(columns=None).reset_index()


def percentile_table(findings: Findings, quantity: str) -> pd.DataFrame:
    """Percentiles of a quantity per layer and head, and pooled, of every model.

    Args:
        findings: of any number of models.
        quantity: dispersion, separation or load.

    Returns:
        The model's facts, layer and head (``all`` where pooled), then the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    measurements = findings.measurements
    rows = measurements.loads if quantity == "load" else measurements.queries
    table: list[dict[Any, Any]] = []
    for model in measurements.models[FACTS].to_dict("records"):
        own = rows[rows["model"] == model["model"]]
        table += [{**model, **row} for row in layer_table(own, quantity).to_dict("records")]
        table.append({**model, "layer": "all", "head": "all", **percentiles(own[quantity])})
    return pd.DataFrame(table)
