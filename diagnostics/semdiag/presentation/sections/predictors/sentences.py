"""What goes with faster learning, in words: correlations that remain, and tasks predicted from the others."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.prediction import SIGNIFICANCE, held_out_tasks, predictor_table
from semdiag.measurement.runs.predictors import CANDIDATES


def predictor_sentences(findings: Findings) -> list[str]:
    """Say which candidates go with speed-up after correction, and how well a task is predicted from the others.

    Args:
        findings: with runs and predictors.

    Returns:
        A sentence on the correlations, one on the strongest of them, and one per choice of held-out prediction.
    """
    table = findings(predictor_table).dropna(subset="tau")
    if table.empty:
        return ["What goes with faster learning is unknown: no two runs have a certain order of speed-ups."]
    kept = table[table["p_corrected"] < SIGNIFICANCE]
    said = [
        f"Of {len(table)} rank correlations with speed-up ({table['candidate'].nunique()} candidates, "
        f"{table['stage'].nunique()} stages, up to {table['cells'].max()} runs) "
        f"{_number(len(kept))} below p = {SIGNIFICANCE:g} after correction for their number."
    ]
    shown = kept if len(kept) else table
    shown = shown.reindex(shown["tau"].abs().sort_values(ascending=False, kind="stable").index).head(3)
    names = "; ".join(correlation_words(row) for row in shown.to_dict("records"))
    return [*said, f"{'Strongest' if len(kept) else 'Strongest, none of them beyond chance'}: {names}.",
            *_held_out(findings(held_out_tasks))]  # fmt: skip


def predictors_in_short(findings: Findings) -> list[str]:
    """The correlations, and the strongest of them."""
    return predictor_sentences(findings)[:2]


def _number(count: int) -> str:
    return "none is" if not count else f"{count} {'is' if count == 1 else 'are'}"


def correlation_words(row: Mapping[Any, Any]) -> str:
    """A row of :func:`~semdiag.findings.prediction.predictor_table` in words.

    Args:
        row: of the table.

    Returns:
        Like ``sound ξ, plateau: τ = -0.62 (-0.81 to -0.30), p = 0.002, corrected 0.04``.
    """
    interval = "" if math.isnan(row["low"]) else f" ({row['low']:.2f} to {row['high']:.2f})"
    return (
        f"{_quantity(row['candidate'])}, {row['stage']}: τ = {row['tau']:.2f}{interval}, p = {row['p']:.2g}, "
        f"corrected {row['p_corrected']:.2g}"
    )


def _held_out(table: pd.DataFrame) -> list[str]:
    said = []
    for choice, rows in table.groupby("choice", sort=False):
        parts = [
            f"{row['group']} {_tau(row['tau'])} (by {_quantity(row['candidate'])}, {row['stage']})"
            for row in rows.to_dict("records")
        ]
        which = "any stage" if choice == "any stage" else "the initialisation alone"
        said.append(
            f"Each task predicted by what was strongest on the others, from {which}, τ between prediction and "
            f"speed-up: {'; '.join(parts)}."
        )
    return said


def _quantity(candidate: str) -> str:
    """The candidate's name without its statistic."""
    return CANDIDATES[candidate].rsplit(",", 1)[0]


def _tau(value: float) -> str:
    return "nothing comparable" if math.isnan(value) else f"{value:.2f}"
