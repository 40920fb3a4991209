"""Tables of ``semdiag convergence``."""

import math

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.strict_json import records
from semdiag.presenting.columns import NEVER, Column, percent, plain, text, two_decimals
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


def _speed(low: float, high: float) -> str:
    return "–" if math.isnan(low) else speed_words(low, high)


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
