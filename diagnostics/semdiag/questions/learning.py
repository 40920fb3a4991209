"""Did the sparse model learn faster? Epochs until the training data are learned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from semdiag.measuring.findings.findings import RUN, Findings, find_pairs, records, seed_names
from semdiag.measuring.measurements import Measurements
from semdiag.measuring.table import OUT_OF_REACH, OUT_OF_REACH_CODE
from semdiag.measuring.training_runs import TARGET, epochs_to
from semdiag.measuring.words import count_of, counted
from semdiag.presenting.answer import Answer, Claim, Glance, Outcome, heading, numbered_claims, top_words
from semdiag.presenting.drawing.panels import POINTS, NothingToDrawError, Panel, Series, model_labels, panels_of
from semdiag.presenting.drawing.style import FAINT, decades, drawing, finished, panel_grid, panel_inches

LEAST_SEEDS = 3  # of a task: fewer show no difference between attentions


def learning_glance(findings: Findings) -> Glance:
    """Return in how many pairs the top-k model learned its training data first; a tie counts for neither."""
    models = findings.measurements.models
    arrivals = {
        str(model): epochs_to(rows.sort_values("epoch")) or math.inf
        for model, rows in findings.measurements.history.groupby("model")
    }
    pairs = [
        pair
        for pair in find_pairs(models[models["snapshot"] == "last"])[0]
        if {pair.full, pair.counterpart} <= arrivals.keys()
        and min(arrivals[pair.full], arrivals[pair.counterpart]) < math.inf
    ]
    if not pairs:
        words = "of a full and a top-k model in which at least one learned its training data"
        return Glance(Outcome.OPEN, "0 pairs", words, of_paper=True)
    first = sum(arrivals[pair.counterpart] < arrivals[pair.full] for pair in pairs)
    tied = sum(arrivals[pair.counterpart] == arrivals[pair.full] for pair in pairs)
    behind = len(pairs) - first - tied
    compared = models[models["model"].isin([pair.counterpart for pair in pairs])]
    seeds = {str(task): int(count) for task, count in compared.groupby("task")["seed"].nunique().items()}
    too_few = max(seeds.values()) < LEAST_SEEDS
    words = f"in which the {top_words(findings)} model reached 95% training accuracy in fewer epochs"
    if behind:
        words += f"; in {behind:,} full attention did"
    if tied:
        words += f"; in {tied:,} both needed the same number"
    counts = [f"{counted(count, 'seed')} of {task}" for task, count in sorted(seeds.items())]
    words += f"; {', '.join(counts)}"
    if too_few:
        words += f": at least {LEAST_SEEDS} of one task would tell"
    return Glance(_order(behind, tied, too_few), count_of(first, len(pairs), "pair"), words, of_paper=True)


def _order(behind: int, tied: int, too_few: bool) -> Outcome:
    """Judge pairs of which so many top-k models were behind, or level."""
    if too_few:
        return Outcome.OPEN
    if behind:
        return Outcome.DOES_NOT
    return Outcome.OPEN if tied else Outcome.HOLDS


@dataclass(frozen=True)
class Run:
    """The history of one training run."""

    series: Series  # the model it led to
    history: pd.DataFrame  # one row per epoch
    target: float  # training accuracy that counts as learned
    arrival: int | None  # first epoch with at least that; None if there was none


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
    targets = {row["model"]: target_of(measurements, row["task"]) for row in records(once)}
    groups = []
    for panel in panels_of(once, RUN, seed_names(measurements.models)):
        runs = []
        for series in panel.series:
            history = histories[series.model]
            target = targets[series.model]
            runs.append(Run(series, history, target, epochs_to(history, target)))
        groups.append((panel, runs))
    return groups


def target_of(measurements: Measurements, task: str) -> float:
    """Return the training accuracy that counts as having learned a task."""
    general = measurements.provenance.get("target", TARGET)
    return float(measurements.provenance.get("targets", {}).get(task, general))


def learning_claims(findings: Findings) -> list[Claim]:
    """Return epochs to 95% training accuracy, by panel."""
    sentences = []
    for panel, runs in training_runs(findings):
        parts = [
            f"{run.series.label} after {counted(run.arrival, 'epoch')}"
            if run.arrival
            else f"{run.series.label} not within its {counted(int(run.history['epoch'].max()), 'epoch')}"
            for run in runs
        ]
        sentences.append(f"{panel.title}, 95% training accuracy: {', '.join(parts)}.")
    if not sentences:
        sentences = ["Nothing is known of the training: no model has a training history."]
    return [*numbered_claims("epochs", sentences), *reach_claims(findings)]


def answer(findings: Findings) -> Answer:
    """Return how many epochs each run took, and which attention was first."""
    return Answer(learning_glance(findings), learning_claims(findings))


def reach_claims(findings: Findings) -> list[Claim]:
    """Name the models whose masks cannot represent their tasks, and say what follows."""
    remarks = findings.measurements.remarks
    models = [*dict.fromkeys(remarks.loc[remarks["code"] == OUT_OF_REACH_CODE, "model"])]
    if not models:
        return []
    labels = model_labels(findings.measurements.models)
    names = "; ".join(labels[model] for model in models)
    sentence = (
        f"Out of reach for {len(models)} of {counted(len(labels), 'model')} ({names}): {OUT_OF_REACH}. "
        "That they do not learn it says nothing about their speed; a global token removes this."
    )
    return [Claim("out-of-reach", sentence, value=len(models), unit="models")]


_NUMBER = 0.3  # inches that the number of an epoch takes
_MOST = 12  # groups of runs that are drawn


@drawing(
    "Training accuracy against epochs, the first epoch with 95% marked, or another target; held-out accuracy "
    "beside it where a run memorised, and the training loss where no run arrived: {shown}.",
    "Compare where the curves cross the dashed line, at 95% training accuracy or another target.",
)
def training_curves(findings: Findings) -> Figure:
    """Draw training accuracy per epoch with the arrival at 95%, and what it does not tell, as in _columns."""
    groups = training_runs(findings)
    if not groups:
        raise NothingToDrawError("No model has a training history.")
    shown = groups[:_MOST]
    columns = _columns([run for _, runs in shown for run in runs])
    figure, axes = panel_grid(
        len(columns) * len(shown), height=2.3, sharey=False, columns=len(columns) if len(columns) > 1 else None
    )
    for place, (panel, runs) in enumerate(shown):
        row = axes[len(columns) * place : len(columns) * (place + 1)]
        for ax, (column, name) in zip(row, columns.items(), strict=True):
            for run in runs:
                _draw_curve(ax, run, column)
            if "accuracy" in column:
                ax.yaxis.set_major_formatter(PercentFormatter(1.0))
                ax.set_ylim(top=1.03)
            elif decades(ax) > 1:
                ax.set_yscale("log")
            ax.set_title(name)
            ax.set_xlabel("epoch")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _mark_arrivals(row[0], runs)
        row[0].set_title(f"{panel.title}: {columns[_TRAINING]}")
    first = f". The first {_MOST} of {len(groups)} tasks and seeds" if len(groups) > _MOST else ""
    held_out = f". Held-out accuracy ends within {100 * _MEMORISED:g} points of it"
    if _HELD_OUT in columns:
        held_out = ". How far held-out accuracy stays below that of training was memorised, not learned"
    return finished(
        figure,
        "marker and number on the dashed line: first epoch with that training accuracy; none: it was not reached"
        + held_out + first,
    )  # fmt: skip


_TRAINING = "train_accuracy"
_HELD_OUT = "holdout_accuracy"
_MEMORISED = 0.02  # held-out accuracy this far below that of training at the end shows that a run memorised


def _columns(runs: Sequence[Run]) -> dict[str, str]:
    """Return what is drawn, by column of the histories: held-out accuracy and loss only if they are news."""
    columns = {_TRAINING: "training accuracy"}
    if any(_memorised(run.history) for run in runs):
        columns[_HELD_OUT] = "held-out accuracy"
    if all(run.arrival is None for run in runs):
        columns["train_loss"] = "training loss (nats)"
    return columns


def _memorised(history: pd.DataFrame) -> bool:
    """Return whether held-out accuracy ends below that of training, or one of them is unknown."""
    if not {_TRAINING, _HELD_OUT} <= set(history):
        return True
    last = history.iloc[-1]
    return not last[_TRAINING] - last[_HELD_OUT] <= _MEMORISED


def _draw_curve(ax: Axes, run: Run, column: str) -> None:
    if column not in run.history:
        return
    chosen = np.unique(np.linspace(0, len(run.history) - 1, min(POINTS, len(run.history))).round().astype(int))
    rows = run.history.iloc[chosen]
    style = run.series.style
    ax.plot(
        [], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, label=run.series.label
    )
    marker = "." if len(rows) == 1 else ""  # a line through one point is invisible
    ax.plot(
        rows["epoch"], rows[column], color=style.color, linestyle=style.line, linewidth=1.3, marker=marker,
    )  # fmt: skip


def _mark_arrivals(ax: Axes, runs: list[Run]) -> None:
    target = runs[0].target
    ax.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
    room = _NUMBER * (ax.get_xlim()[1] - ax.get_xlim()[0]) / panel_inches(ax)
    last = -math.inf
    line = 0
    for epoch, style in sorted(((r.arrival, r.series.style) for r in runs if r.arrival), key=lambda one: one[0]):
        line = line + 1 if epoch - last < room else 0  # below the number before, where they would overlap
        last = epoch
        ax.plot(epoch, target, marker=style.marker, color=style.color, markersize=6)
        ax.annotate(
            f"{epoch}", (epoch, target), xytext=(2, -4 - 8 * line), textcoords="offset points", fontsize=9,
            color=style.color, va="top", path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


HEADINGS = heading(
    "learning", "Did it learn faster?", (training_curves,),
    "One run per curve: a different seed can shift the arrival by many epochs. Epochs are counted, not seconds.",
)  # fmt: skip
