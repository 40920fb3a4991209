"""Tables of report sections."""

from collections.abc import Callable, Sequence

import pandas as pd

from semdiag.measuring.findings.distributions import all_by_name, percentile_table
from semdiag.measuring.findings.finding import Finding
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Tables

FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]


def with_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the facts of each model in front.

    Args:
        findings: of the models.
        table: with the column ``model``.
    """
    return findings.measurements.models[FACTS].merge(table, on="model")


def one_table(name: str, question: Callable[[Findings], pd.DataFrame]) -> Tables:
    """Return the tables of a section with a single table, preceded by the facts of each model.

    Args:
        name: of the file, without suffix.
        question: answered by the table.
    """
    return lambda findings, alone: {name: with_facts(findings, findings(question))}


def verdict_table(judged: Sequence[Finding]) -> pd.DataFrame:
    """Return findings as a table, their numbers in words.

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
    """Return a table with task, attention and seed of each run in front.

    Args:
        findings: with runs.
        table: with the column ``model``.
    """
    return findings.measurements.runs[["model", "task", "attention", "seed"]].merge(table, on="model")


def a_column_each(table: pd.DataFrame) -> pd.DataFrame:
    """Return a column for every quantity and statistic, like ``dispersion_p50``, instead of a row."""
    names = table["quantity"] + "_" + table["statistic"]
    places = [column for column in table if column not in ("quantity", "statistic", "value")]
    wide = table.assign(name=pd.Categorical(names, names.unique())).pivot(
        index=places, columns="name", values="value"
    )
    return wide.rename_axis(columns=None).reset_index()


def percentile_csv(findings: Findings, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity per layer and head, and pooled, with the model's facts.

    Args:
        findings: of any number of models.
        quantity: dispersion, separation or load.
    """
    return with_facts(findings, all_by_name(findings(percentile_table, quantity)))
