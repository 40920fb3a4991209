"""Tables of ``semdiag convergence``."""

import math
from dataclasses import replace

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import Summary, records
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import STAYS, Column, percent, plain, text, three_digits, two_decimals
from semdiag.presenting.terminal.console import NumberTable, wide_console
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


def _speed(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else speed_words(low, high)


def _accuracy_and_dispersion(accuracy: float, dispersion: float) -> str:
    return f"{percent(accuracy)} δ {three_digits(dispersion)}"


def _correlation(rho: float | None, p: float | None) -> str:
    return "–" if rho is None or p is None or math.isnan(rho) else f"{rho:+.2f} ({p:.2g})"


_RUN = (Column("group", "task", text), Column("attention", said=text))
_SEED = Column("seed", said=plain)
_RUNS = (
    *_RUN, _SEED, Column("arrival", "epochs to {}", plain), Column("low high", "speed-up", _speed, goes=STAYS),
    Column("ratio", "δ ratio", two_decimals), Column("train_accuracy", "train", percent, goes=3),
    Column("holdout_accuracy", "held-out", percent), Column("best_holdout_accuracy", "best", percent, goes=1),
    Column("gap", said=percent, goes=2),
)  # fmt: skip
_SEEDS = (
    *_RUN, Column("seeds", said=plain, goes=2), Column("arrived", said=plain, goes=1),
    Column("median_epochs", said=lambda epochs: "not reached" if epochs == math.inf else f"{epochs:g}"),
    Column("speed_up_low speed_up_high", "median speed-up", _speed, goes=STAYS),
    Column("one_off", "one epoch off", plain), Column("interval", said=plain, goes=STAYS),
)  # fmt: skip


def print_convergence(findings: Findings) -> None:
    """Print one table of runs and one over seeds, then what else was found, in sentences."""
    console = wide_console()
    measurements = findings.measurements
    found, pairs = findings(arrivals), findings(speed_dispersion_table)
    speeds = {one["model"]: {name: one[name] for name in ("low", "high", "ratio")} for one in records(pairs)}
    none = dict.fromkeys(("low", "high", "ratio"))
    runs = [run | {"arrival": arrival_words(run)} | speeds.get(run["model"], none) for run in records(found)]
    console.print(NumberTable(_RUNS, runs, unit=target_words(findings)))
    if measurements.provenance.get("targets"):
        console.print(targets_sentence(findings))
    if len(pairs) and (over := findings(run_statistics))["seeds"].max() > 1:
        console.print(NumberTable(_SEEDS, map(_over_seeds, records(over))))
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


def _over_seeds(row: Summary) -> Summary:
    speeds = {} if row["pairs"] else dict.fromkeys(("speed_up_low", "speed_up_high"))
    return {**row, **speeds, "one_off": epoch_words(row), "interval": interval_words(row)}


def _lengths(findings: Findings, found: pd.DataFrame) -> NumberTable:
    """A row a run, a column a length."""
    table = findings.measurements.lengths
    table = table[table["layer"] == ALL]
    cells: dict[str, Summary] = {}
    for row in records(table):
        cells.setdefault(row["model"], {})[f"{row['quantity']}-{row['statistic']}-{row['length']}"] = row["value"]
    columns = [
        Column(f"accuracy-value-{n} dispersion-p50-{n}", str(n), _accuracy_and_dispersion)
        for n in sorted(table["length"].unique())
    ]
    runs = [run | cells[run["model"]] for run in records(found) if run["model"] in cells]
    first = replace(_RUN[0], heading="accuracy, median δ on length")
    return NumberTable([first, _RUN[1], _SEED, *columns], runs)


def _predictors(findings: Findings) -> NumberTable:
    """A row a candidate, a column a stage."""
    outcome = next(iter(OUTCOMES))
    rows = findings(predictor_table)
    found = {(row["candidate"], row["stage"]): row for row in records(rows[rows["outcome"] == outcome])}
    cells = [
        {"candidate": quantity(one), "stages": [found.get((one, stage)) for stage in STAGES]}
        for one in dict.fromkeys(candidate for candidate, _ in found)
    ]
    heading = f"rank correlation with the {OUTCOMES[outcome]} (corrected p)"
    stages = [
        Column(f"stages.{at}.rho stages.{at}.p_corrected", stage, _correlation, goes=STAYS)
        for at, stage in enumerate(STAGES)
    ]
    return NumberTable([Column("candidate", heading, text), *stages], cells)
