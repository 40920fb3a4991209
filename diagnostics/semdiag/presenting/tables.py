"""Tables of report sections, written as CSV."""

from collections.abc import Callable, Sequence

import pandas as pd

from semdiag.measuring.findings.distributions import all_by_name, percentile_table
from semdiag.measuring.findings.finding import Finding
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.section import Tables

FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]
_RUN_FACTS = ["model", "task", "attention", "seed"]
_VERDICT = ["subject", "claim", "form", "where", "verdict", "numbers", "note"]


def with_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """Put the facts of each model in front of a table with the column ``model``."""
    return findings.measurements.models[FACTS].merge(table, on="model")


def with_run_facts(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """Put task, attention and seed of each run in front of a table with the column ``model``."""
    return findings.measurements.runs[_RUN_FACTS].merge(table, on="model")


def answers_with_facts(**answers: Callable[[Findings], pd.DataFrame]) -> Tables:
    """Return the tables of a section, each with the facts of its models in front."""
    return lambda findings, alone: {n: with_facts(findings, findings(answer)) for n, answer in answers.items()}


def verdict_table(judged: Sequence[Finding]) -> pd.DataFrame:
    """Return findings as a table, their numbers as one text: ``name = value; …``."""
    rows = []
    for finding in judged:
        numbers = "; ".join(f"{name} = {value:.12g}" for name, value in finding.numbers.items())
        rows.append({**vars(finding), "verdict": finding.verdict.value, "numbers": numbers})
    return pd.DataFrame(rows, columns=_VERDICT)


def percentile_csv(findings: Findings, quantity: str) -> pd.DataFrame:
    """Return percentiles of a quantity per layer and head, and pooled, with the model's facts."""
    return with_facts(findings, all_by_name(findings(percentile_table, quantity)))
