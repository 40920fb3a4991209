"""Epochs until the training data are learned: the runs, the answer at one glance, and its sentences."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import RUN, Findings, find_pairs
from semdiag.measuring.table import OUT_OF_REACH, OUT_OF_REACH_CODE
from semdiag.measuring.words import counted
from semdiag.presenting.drawing.panels import Panel, Series, model_labels, panels_of
from semdiag.presenting.section import Answer, Glance, count_of, top_words
from semdiag.questions.convergence.answer import epochs_to

LEAST_SEEDS = 3  # of a task: fewer show no difference between attentions


def learning_glance(findings: Findings) -> Glance:
    """Return in how many pairs the top-k model learned its training data first; a tie counts for neither."""
    measurements = findings.measurements
    models = measurements.models
    pairs = find_pairs(models[models["snapshot"] == "last"])[0]
    arrived = {
        str(model): epochs_to(rows.sort_values("epoch")) or np.inf
        for model, rows in measurements.history.groupby("model")
    }
    known = [pair for pair in pairs if {pair.full, pair.other} <= arrived.keys()]
    judged = [p for p in known if np.isfinite(min(arrived[p.full], arrived[p.other]))]
    if not judged:
        return Glance(
            Answer.OPEN,
            "0 pairs",
            "of a full and a top-k model in which at least one learned its training data",
            claim=True,
        )
    first, tied = (
        sum(compare(arrived[p.other], arrived[p.full]) for p in judged) for compare in (operator.lt, operator.eq)
    )
    behind = len(judged) - first - tied
    seeds = _seeds(models, [pair.other for pair in judged])
    few = max(seeds.values()) < LEAST_SEEDS
    answer = Answer.OPEN if few else Answer.DOES_NOT if behind else Answer.OPEN if tied else Answer.HOLDS
    words = f"in which the {top_words(findings)} model reached 95% training accuracy in fewer epochs"
    words += f"; in {behind:,} full attention did" if behind else ""
    words += f"; in {tied:,} both needed the same number" if tied else ""
    counts = ", ".join(f"{counted(count, 'seed')} of {task}" for task, count in sorted(seeds.items()))
    words += f"; {counts}" + (f": at least {LEAST_SEEDS} of one task would tell" if few else "")
    return Glance(answer, count_of(first, len(judged), "pair"), words, claim=True)


def _seeds(models: pd.DataFrame, compared: Sequence[str]) -> dict[str, int]:
    """Return how many seeds of each task were compared."""
    rows = models[models["model"].isin(compared)]
    return {str(task): int(count) for task, count in rows.groupby("task")["seed"].nunique().items()}


@dataclass(frozen=True)
class Run:
    """The history of one training run."""

    series: Series  # the model it led to
    history: pd.DataFrame  # one row per epoch
    arrival: int | None  # first epoch with at least 95% training accuracy; None if there was none

    @property
    def epochs(self) -> int:
        """Return the number of epochs trained so far."""
        return int(self.history["epoch"].max())


def training_runs(findings: Findings) -> list[tuple[Panel, list[Run]]]:
    """Group the training histories, where there are any, by task, seed and size; snapshots of a run count once."""
    measurements = findings.measurements
    if "epoch" not in measurements.history:
        return []
    histories = {
        str(model): rows.sort_values("epoch")
        for model, rows in measurements.history.dropna(subset=["epoch"]).groupby("model", sort=False)
    }
    models = measurements.models[measurements.models["model"].isin(list(histories))]
    length = models["model"].map(lambda model: len(histories[model]))
    once = models.assign(_length=length).sort_values("_length", ascending=False, kind="stable")
    once = once.drop_duplicates([*RUN, "attention", "k", "global_tokens"]).sort_index()
    if once.empty:
        return []
    return [
        (panel, [Run(s, histories[s.model], epochs_to(histories[s.model])) for s in panel.series])
        for panel in panels_of(once, RUN)
    ]


def learning_in_short(findings: Findings) -> list[str]:
    """Return epochs to 95% training accuracy, by panel."""
    sentences = []
    for panel, runs in training_runs(findings):
        parts = [
            f"{run.series.label} after {counted(run.arrival, 'epoch')}"
            if run.arrival
            else f"{run.series.label} not within its {counted(run.epochs, 'epoch')}"
            for run in runs
        ]
        sentences.append(f"{panel.title}, 95% training accuracy: {', '.join(parts)}.")
    sentences = sentences or ["Nothing is known of the training: no model has a training history."]
    return [*sentences, *reach_sentences(findings)]


def reach_sentences(findings: Findings) -> list[str]:
    """Name the models whose masks cannot represent their tasks, and say what follows."""
    remarks = findings.measurements.remarks
    models = [*dict.fromkeys(remarks.loc[remarks["code"] == OUT_OF_REACH_CODE, "model"])]
    if not models:
        return []
    labels = model_labels(findings.measurements.models)
    names = "; ".join(labels[model] for model in models)
    return [
        f"Out of reach for {len(models)} of {counted(len(labels), 'model')} ({names}): {OUT_OF_REACH}. "
        "That they do not learn it says nothing about their speed; a global token removes this."
    ]
