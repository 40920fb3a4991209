"""What goes with faster learning, in words: significant correlations, and tasks predicted from the others."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.runs.training_runs import UNFINISHED
from semdiag.questions.convergence.answer.epochs import arrivals
from semdiag.questions.predictors.answer.mask_cells import OUTCOMES, left_out_runs
from semdiag.questions.predictors.answer.prediction import (
    SIGNIFICANCE,
    held_out_tasks,
    predictor_table,
    quantity,
    too_few_masks,
)


def predictor_sentences(findings: Findings) -> list[str]:
    """Return which candidates go with learning after correction, and how well other tasks predict a task.

    Returns:
        For each outcome a sentence on the correlations, one on the strongest of them, and those on held-out tasks;
        last, where runs are left out, one on how many and why.
    """
    sentences = []
    for outcome, words in OUTCOMES.items():
        table = findings(predictor_table)
        table = table[table["outcome"] == outcome].dropna(subset="rho")
        sentences += _sentences(table, words) if len(table) else [_unknown(findings, outcome)]
        rows = findings(held_out_tasks)
        sentences += _held_out(rows[rows["outcome"] == outcome], words)
    return sentences + _left_out(findings)


def predictors_in_short(findings: Findings) -> list[str]:
    """Return sentences on the correlations with the primary outcome, the strongest, and omitted runs."""
    left_out = _left_out(findings)
    sentences = predictor_sentences(findings)
    return sentences[: len(sentences) - len(left_out)][:2] + left_out


def _left_out(findings: Findings) -> list[str]:
    table = findings(left_out_runs)
    if table.empty:
        return []
    words = {UNFINISHED: "unfinished (stopped, or diverged)"}
    counts = table["why"].value_counts(sort=False).to_dict()
    parts = "; ".join(f"{count} {words.get(str(why), why)}" for why, count in counts.items())
    return [f"Left out of {len(findings(arrivals))} runs: {parts}."]


def _unknown(findings: Findings, outcome: str) -> str:
    why = (
        "no task has 5 masks of which all is known"
        if too_few_masks(findings, outcome)
        else "in no task do 5 known masks differ in it"
    )
    return f"What goes with the {OUTCOMES[outcome]} is unknown: {why}."


def _sentences(table: pd.DataFrame, words: str) -> list[str]:
    kept = table[table["p_corrected"] < SIGNIFICANCE]
    first = table.iloc[0]
    count, tried, tasks = int(first["relabellings"]), int(first["tried"]), int(first["tasks"])
    sentence = (
        f"Of {len(table)} rank correlations with the {words} ({table['candidate'].nunique()} candidates, "
        f"{table['stage'].nunique()} stages) within {counted(tasks, 'task')}, over "
        f"{first['cells']} cells of task × mask ({first['left_out']} left out, where something is unknown or "
        f"a task lacks 5 known masks that differ), {_number(len(kept))} below p = {SIGNIFICANCE:g} after "
        f"correction for their number; masks relabelled alike in all tasks ({count:.3g} ways that differ, "
        f"{tried} tried: no p-value is below {max(1 / count, 1 / tried):.2g})."
    )
    shown = kept if len(kept) else table
    shown = shown.reindex(shown["rho"].abs().sort_values(ascending=False, kind="stable").index).head(3)
    names = "; ".join(correlation_words(row) for row in shown.to_dict("records"))
    none = " No interval: fewer than 8 masks, or tasks of so unlike numbers of them that resamples lose some."
    sentence += none * bool(table["low"].isna().all())
    return [sentence, f"{'Strongest' if len(kept) else 'Strongest, none of them beyond chance'}: {names}."]


def _number(count: int) -> str:
    return "none is" if not count else f"{count} {'is' if count == 1 else 'are'}"


def correlation_words(row: Mapping[Any, Any]) -> str:
    """Return a row of :func:`~semdiag.questions.predictors.answer.prediction.predictor_table` in words.

    Returns:
        Like ``sound ξ, initialisation: ρ = -0.62 (-0.81 to -0.30), p = 0.002, corrected 0.04``.
    """
    interval = "" if math.isnan(row["low"]) else f" ({row['low']:.2f} to {row['high']:.2f})"
    return (
        f"{short(row['candidate'])}, {row['stage']}: ρ = {row['rho']:.2f}{interval}, p = {row['p']:.2g}, "
        f"corrected {row['p_corrected']:.2g}"
    )


def _held_out(table: pd.DataFrame, words: str) -> list[str]:
    sentences = []
    for choice, rows in table.groupby("choice", sort=False):
        by = (
            "the candidate that was strongest" if choice == "strongest elsewhere" else "the mean rank of each mask"
        )
        parts = [
            f"{row['group']} {_rho(row['rho'])}"
            + (f" (by {short(row['candidate'])}, {row['stage']})" if isinstance(row["candidate"], str) else "")
            for row in rows.to_dict("records")
        ]
        sentences.append(
            f"Each task predicted by {by} on the others, ρ between prediction and {words}: {'; '.join(parts)}; "
            f"mean {_rho(float(rows['rho'].mean()))}."
        )
    return sentences


def short(candidate: str) -> str:
    """Return a candidate's name without its statistic."""
    return quantity(candidate).rsplit(",", 1)[0]


def _rho(value: float) -> str:
    return "nothing comparable" if math.isnan(value) else f"{value:.2f}"
