"""Tables of ``semdiag convergence``."""

import math
from dataclasses import replace

import pandas as pd

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records
from semdiag.measuring.table import ALL
from semdiag.presenting.columns import NEVER, Column, percent, plain, text, three_digits, two_decimals
from semdiag.presenting.question import ANSWERS
from semdiag.presenting.terminal.console import NumberTable, wide_console
from semdiag.questions.convergence.answer.epochs import arrivals
from semdiag.questions.convergence.answer.speed_and_dispersion import run_statistics, speed_dispersion_table
from semdiag.questions.convergence.words import (
    arrival_words,
    convergence_in_short,
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


def _speed(low: float, high: float) -> str:
    return "–" if math.isnan(low) else speed_words(low, high)


def _accuracy_and_dispersion(accuracy: float, dispersion: float) -> str:
    return f"{percent(accuracy)} δ {three_digits(dispersion)}"


def _correlation(rho: float | None, p: float | None) -> str:
    return "–" if rho is None or p is None or math.isnan(rho) else f"{rho:+.2f} ({p:.2g})"


_RUN = (Column("group", "task", text), Column("attention", form=text))
_SEED = Column("seed", form=plain)
_RUNS = (
    *_RUN, _SEED, Column("", "epochs to {}", arrival_words), Column("low high", "speed-up", _speed, drop=NEVER),
    Column("ratio", "δ ratio", two_decimals), Column("train_accuracy", "train", percent, drop=3),
    Column("holdout_accuracy", "held-out", percent), Column("best_holdout_accuracy", "best", percent, drop=1),
    Column("gap", form=percent, drop=2),
)  # fmt: skip
_SEEDS = (
    *_RUN, Column("seeds", form=plain, drop=2), Column("arrived", form=plain, drop=1),
    Column("median_epochs", form=lambda epochs: "not reached" if epochs == math.inf else f"{epochs:g}"),
    Column("speed_up_low speed_up_high", "median speed-up", _speed, drop=NEVER),
    Column("", "one epoch off", epoch_words), Column("", "interval", interval_words, drop=NEVER),
)  # fmt: skip


def print_convergence(findings: Findings) -> None:
    """Print a table of runs and one over seeds, then in sentences what the tables do not say."""
    console = wide_console()
    measurements, runs, pairs = findings.measurements, findings(arrivals), findings(speed_dispersion_table)
    speeds = runs.merge(pairs[["model", "low", "high", "ratio"]], how="left", on="model")
    console.print(NumberTable(_RUNS, records(speeds), unit=target_words(findings)))
    if measurements.provenance.get("targets"):
        console.print(targets_sentence(findings))
    if len(pairs) and (over_seeds := findings(run_statistics))["seeds"].max() > 1:
        console.print(NumberTable(_SEEDS, records(over_seeds)))
    for sentence in convergence_in_short(findings)[max(ANSWERS, runs["group"].nunique()) :]:
        console.print(sentence)
    if len(measurements.lengths):
        console.print(_lengths(measurements.lengths, runs))
    if len(measurements.predictors):
        console.print(_predictors(findings))
        for sentence in predictor_sentences(findings):
            console.print(sentence)
    for sentence in along_sentences(findings):
        console.print(sentence)


def _lengths(lengths: pd.DataFrame, runs: pd.DataFrame) -> NumberTable:
    """Return a row a run, a column a length."""
    pooled = lengths[lengths["layer"] == ALL]
    names = pooled["quantity"] + "-" + pooled["statistic"] + "-" + pooled["length"].astype(str)
    by_run = pooled.assign(name=names).pivot(index="model", columns="name", values="value")
    columns = [
        Column(f"accuracy-value-{n} dispersion-p50-{n}", str(n), _accuracy_and_dispersion)
        for n in sorted(pooled["length"].unique())
    ]
    first = replace(_RUN[0], heading="accuracy, median δ on length")
    return NumberTable([first, _RUN[1], _SEED, *columns], records(runs.merge(by_run, on="model")))


def _predictors(findings: Findings) -> NumberTable:
    """Return a row a candidate, a column a stage."""
    outcome = next(iter(OUTCOMES))
    table = findings(predictor_table)
    by_place = {(row["candidate"], row["stage"]): row for row in records(table[table["outcome"] == outcome])}
    rows = [
        {"candidate": candidate, "stages": [by_place.get((candidate, stage)) for stage in STAGES]}
        for candidate in dict.fromkeys(candidate for candidate, _ in by_place)
    ]
    heading = f"rank correlation with the {OUTCOMES[outcome]} (corrected p)"
    columns = [
        Column(f"stages.{at}.rho stages.{at}.p_corrected", stage, _correlation, NEVER)
        for at, stage in enumerate(STAGES)
    ]
    return NumberTable([Column("candidate", heading, quantity, left=True), *columns], rows)
