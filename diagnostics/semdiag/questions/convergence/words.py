"""Sentences on runs: arrivals, speed-ups and their bounds."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.training_runs import NOT_BEGUN, TARGET, UNFINISHED
from semdiag.measuring.words import interval, percent
from semdiag.presenting.question import ANSWERS
from semdiag.presenting.section import NEVER, Column, NumberTable, plain, text, two_decimals, wide_console
from semdiag.questions.convergence.answer import arrivals, run_statistics, speed_dispersion_table, target_of
from semdiag.questions.learning.answer import reach_sentences


def target_words(findings: Findings) -> str:
    """Return the accuracy that counts as learned, in short: ``95%``, or ``the target`` if tasks differ."""
    if findings.measurements.provenance.get("targets"):
        return "the target"
    return percent(findings.measurements.provenance.get("target", TARGET), "g")


def targets_sentence(findings: Findings) -> str:
    """Return all targets: ``The target is 95% training accuracy, for listops 36%``."""
    general = percent(findings.measurements.provenance.get("target", TARGET), "g")
    others = findings.measurements.provenance.get("targets", {})
    single = "".join(f", for {task} {percent(value, 'g')}" for task, value in others.items())
    return f"The target is {general} training accuracy{single}."


def arrival_words(run: Mapping[Any, Any]) -> str:
    """Return when a run arrived: ``35``, or ``not in 100``; of an unfinished run also how much is left."""
    if run["state"] == NOT_BEGUN:
        return "not begun"
    words = f"not in {run['epochs']}" if pd.isna(run["arrival"]) else str(run["arrival"])
    return f"{words} (of {run['planned']}, unfinished)" if run["state"] == UNFINISHED else words


def speed_words(low: float, high: float) -> str:
    """Return a speed-up or its bound: ``11.7``, ``above 20``, ``below 0.35``, ``unknown``."""
    if math.isnan(low) or (low == 0 and math.isinf(high)):
        return "unknown"
    if low == high:
        return f"{low:.3g}"
    if math.isinf(high):
        return f"above {low:.3g}"
    return f"below {high:.3g}" if low == 0 else f"{low:.3g} to {high:.3g}"


def epoch_words(row: Mapping[Any, Any]) -> str:
    """Return the range of a median speed-up if every arrival may be off by one epoch; a dash if unknown."""
    known = row["pairs"] and row["speed_up_low"] == row["speed_up_high"]
    return speed_words(row["epoch_low"], row["epoch_high"]) if known else "–"


def speed_interval(row: Mapping[Any, Any]) -> str:
    """Return the interval of a median speed-up over seeds, or why there is none."""
    if row["pairs"] == 0:
        return "–"
    if row["pairs"] == 1:
        return "one seed: no interval"
    ends = interval(row["interval_low"], row["interval_high"], _factor, between=" to ")
    return f"{ends} ({row['interval_coverage']:.0%})"


def _factor(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def convergence_in_short(findings: Findings) -> list[str]:
    """Return per task which attention needs the fewest epochs, and what limits that."""
    runs = findings(arrivals)
    sentences = []
    for group, target, rows in _settings(findings):
        soonest = rows["median_epochs"] == rows["median_epochs"].min()
        alone = len(rows) > soonest.sum() == 1
        start = f"{rows.loc[soonest, 'attention'].iloc[0]} needs the fewest epochs" if alone else "epochs"
        by_speed = rows.sort_values("median_epochs", kind="stable").to_dict("records")
        parts = [f"{row['attention']} {_arrived(row, runs[runs['group'] == group])}" for row in by_speed]
        sentences.append(f"{group}: {start} to {target} training accuracy: {'; '.join(parts)}.")
    return sentences + reach_sentences(findings) + _reservations(findings, runs)


def convergence_sentences(findings: Findings) -> list[str]:
    """Return per task and attention how many epochs were needed, and the speed-up over full attention."""
    runs = findings(arrivals)
    sentences = []
    for group, target, rows in _settings(findings):
        parts = [_attention_words(row, runs[runs["group"] == group]) for row in rows.to_dict("records")]
        sentences.append(f"{group}, epochs to {target} training accuracy: {'; '.join(parts)}.")
    return sentences


def _settings(findings: Findings) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield each setting with its target and a row for each kind of attention."""
    seeds = findings(run_statistics)
    for group, rows in seeds.groupby("group", sort=False) if len(seeds) else ():
        yield str(group), percent(target_of(findings.measurements, rows["task"].iloc[0]), "g"), rows


def _arrived(row: Mapping[Any, Any], runs: pd.DataFrame) -> str:
    """Return when the runs of one attention arrived."""
    return ", ".join(map(arrival_words, runs[runs["attention"] == row["attention"]].to_dict("records")))


def _attention_words(row: dict[Any, Any], runs: pd.DataFrame) -> str:
    sentence = f"{row['attention']} {_arrived(row, runs)}"
    if row["pairs"]:
        speed = speed_words(row["speed_up_low"], row["speed_up_high"])
        name = "speed-up" if row["pairs"] == 1 else f"median speed-up over {row['pairs']} seeds"
        one_epoch_off = f"; one epoch off {epoch_words(row)}" if epoch_words(row) != "–" else ""
        sentence += f" ({name} {speed}{one_epoch_off}; {speed_interval(row)})"
    return sentence


def _reservations(findings: Findings, table: pd.DataFrame) -> list[str]:
    sentences = []
    unfinished = table[table["state"].isin([UNFINISHED, NOT_BEGUN])]
    if len(unfinished):
        rows = unfinished.to_dict("records")
        names = "; ".join(f"{row['model']} {row['epochs']} of {row['planned']} epochs" for row in rows)
        sentences.append(f"Unfinished, so more may be known later: {names}.")
    runs = len(findings.measurements.runs)
    if runs > len(table):
        sentences.append(
            f"{runs - len(table)} of {runs} files are copies or other snapshots of a run that is shown: of each "
            "run the file with the most epochs counts."
        )
    left_out = findings.measurements.provenance.get("left_out", [])
    if left_out:
        sentences.append(f"Left out, because they have no training history: {', '.join(left_out)}.")
    return sentences


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
    Column("", "one epoch off", epoch_words), Column("", "interval", speed_interval, drop=NEVER),
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
