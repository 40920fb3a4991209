"""Tables of ``semdiag convergence`` on stderr."""

import math
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.table import ALL
from semdiag.presenting.terminal.console import NumberTable, number_table, wide_console
from semdiag.questions.convergence.answer.epochs import arrivals
from semdiag.questions.convergence.answer.speed_and_dispersion import run_statistics, speed_dispersion_table
from semdiag.questions.convergence.words import (
    arrival_words,
    convergence_sentences,
    epoch_words,
    interval_words,
    speed_words,
    target_words,
    targets_sentence,
)
from semdiag.questions.over_training.words import along_sentences
from semdiag.questions.predictors.answer.mask_cells import OUTCOMES, STAGES
from semdiag.questions.predictors.answer.prediction import predictor_table, quantity
from semdiag.questions.predictors.words import predictor_sentences


def print_convergence(findings: Findings) -> None:
    """Print one table of runs and one over seeds, then what else was found, in sentences.

    Args:
        findings: with runs.
    """
    console = wide_console()
    measurements = findings.measurements
    found, pairs = findings(arrivals), findings(speed_dispersion_table)
    console.print(_runs(findings, found, pairs))
    if measurements.provenance.get("targets"):
        console.print(targets_sentence(findings))
    if len(pairs) and (over := findings(run_statistics))["seeds"].max() > 1:
        console.print(_seeds(over))
    tasks = found["group"].nunique()
    for sentence in convergence_sentences(findings)[tasks:]:  # what the tables do not say
        console.print(sentence)
    if len(measurements.lengths):
        console.print(_lengths(findings, found))
    if len(measurements.predictors):
        console.print(_predictors(findings))
        for sentence in predictor_sentences(findings):
            console.print(sentence)
    for sentence in along_sentences(findings):
        console.print(sentence)


def _runs(findings: Findings, found: pd.DataFrame, pairs: pd.DataFrame) -> NumberTable:
    heads = ["task", "attention", "seed", f"epochs to {target_words(findings)}", "speed-up", "δ ratio",
             "train", "held-out", "best", "gap"]  # fmt: skip
    table = number_table(heads, names=2, least=["best", "gap", "train"], kept=["speed-up"])
    speeds = pairs.set_index("model")
    for run in found.to_dict("records"):
        pair = speeds.loc[run["model"]] if run["model"] in speeds.index else None
        table.add_row(
            run["group"],
            run["attention"],
            str(run["seed"]),
            arrival_words(run),
            "–" if pair is None else speed_words(pair["low"], pair["high"]),
            "–" if pair is None else f"{pair['ratio']:.2f}",
            *(_percent(run[name]) for name in ("train_accuracy", "holdout_accuracy", "best_holdout_accuracy")),
            _percent(run["gap"]),
        )
    return table


def _seeds(over: pd.DataFrame) -> NumberTable:
    heads = [
        "task",
        "attention",
        "seeds",
        "arrived",
        "median epochs",
        "median speed-up",
        "one epoch off",
        "interval",
    ]
    table = number_table(heads, names=2, least=["arrived", "seeds"], kept=["median speed-up", "interval"])
    for row in over.to_dict("records"):
        median = row["median_epochs"]
        table.add_row(
            row["group"],
            row["attention"],
            str(row["seeds"]),
            str(row["arrived"]),
            "not reached" if math.isinf(median) else f"{median:g}",
            "–" if row["pairs"] == 0 else speed_words(row["speed_up_low"], row["speed_up_high"]),
            epoch_words(row),
            interval_words(row),
        )
    return table


def _lengths(findings: Findings, found: pd.DataFrame) -> NumberTable:
    lengths_measured = findings.measurements.lengths
    rows = lengths_measured[lengths_measured["layer"] == ALL]
    lengths = sorted(rows["length"].unique())
    table = number_table(["accuracy, median δ on length", "attention", "seed", *map(str, lengths)], names=2)
    value = rows.set_index(["model", "length", "quantity", "statistic"])["value"]
    for run in found[found["model"].isin(rows["model"])].to_dict("records"):
        own = value[run["model"]]
        cells = [f"{own[n, 'accuracy', 'value']:.1%} δ {own[n, 'dispersion', 'p50']:.3g}" for n in lengths]
        table.add_row(run["group"], run["attention"], str(run["seed"]), *cells)
    return table


def _predictors(findings: Findings) -> NumberTable:
    outcome = next(iter(OUTCOMES))
    table = number_table([f"rank correlation with the {OUTCOMES[outcome]} (corrected p)", *STAGES], names=1)
    rows = findings(predictor_table)
    rows = rows[rows["outcome"] == outcome]
    found = {(row["candidate"], row["stage"]): row for row in rows.to_dict("records")}
    for candidate in rows["candidate"].unique():
        table.add_row(quantity(candidate), *(_correlation(found.get((candidate, stage))) for stage in STAGES))
    return table


def _correlation(row: dict[Any, Any] | None) -> str:
    return "–" if row is None or math.isnan(row["rho"]) else f"{row['rho']:+.2f} ({row['p_corrected']:.2g})"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"
