"""Accuracy and loss against epochs, and when each run had learned its training data."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from semdiag.findings.findings import Findings
from semdiag.measurement.runs.training_runs import TARGET
from semdiag.presentation.drawing.curves import POINTS
from semdiag.presentation.drawing.panels import NothingToDrawError
from semdiag.presentation.drawing.style import (
    FAINT,
    decades,
    legend_on_top,
    note_below,
    panel_grid,
    paper_style,
    title_with_facts,
)
from semdiag.presentation.sections.learning.learning_speed import Run, training_runs


@paper_style
def training_curves(findings: Findings) -> Figure:
    """Draw training and held-out accuracy and loss per epoch, with the arrival at 95 % training accuracy.

    Args:
        findings: of any number of models with training histories.

    Returns:
        Two panels per task, seed and size: accuracy and loss.

    Raises:
        NothingToDrawError: if no model brings a training history.
    """
    groups = training_runs(findings)
    if not groups:
        raise NothingToDrawError("No model brings its training history.")
    figure, axes = panel_grid(2 * len(groups), sharey=False, columns=2)
    for (panel, runs), accuracy, loss in zip(groups, axes[::2], axes[1::2], strict=True):
        for run in runs:
            _draw_curves(accuracy, run, "accuracy")
            _draw_curves(loss, run, "loss")
        _finish_accuracy(accuracy, runs)
        if decades(loss) > 1:
            loss.set_yscale("log")
        for ax, what in ((accuracy, "accuracy"), (loss, "cross-entropy (nats)")):
            title_with_facts(ax, panel.title, [_fact(run) for run in runs] if ax is accuracy else [])
            ax.set_ylabel(what)
            ax.set_xlabel("epoch")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_on_top(figure, axes)
    note_below(
        figure, "thick: training; thin: held-out; marker on the 95 % line: first epoch with that training accuracy"
    )
    return figure


def _fact(run: Run) -> str:
    """When the run arrived, in words."""
    arrived = f"95 % at epoch {run.arrival}" if run.arrival else f"95 % not reached in {run.epochs} epochs"
    return f"{run.series.label}: {arrived}"


def _draw_curves(ax: Axes, run: Run, quantity: str) -> None:
    chosen = np.unique(np.linspace(0, len(run.history) - 1, min(POINTS, len(run.history))).round().astype(int))
    rows, style = run.history.iloc[chosen], run.series.style
    ax.plot(
        [], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, label=run.series.label
    )
    for column, width in ((f"train_{quantity}", 1.6), (f"holdout_{quantity}", 0.7)):
        if column in rows:
            marker = "." if len(rows) == 1 else ""  # a line of one point is nothing
            ax.plot(
                rows["epoch"],
                rows[column],
                color=style.color,
                linestyle=style.line,
                linewidth=width,
                marker=marker,
            )


def _finish_accuracy(ax: Axes, runs: list[Run]) -> None:
    ax.axhline(TARGET, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
    for run in runs:
        if run.arrival:
            ax.plot(
                run.arrival, TARGET, marker=run.series.style.marker, color=run.series.style.color, markersize=6
            )
            ax.annotate(
                str(run.arrival), (run.arrival, TARGET), xytext=(6, -10), textcoords="offset points",
                fontsize=7, color=run.series.style.color,
            )  # fmt: skip
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(top=1.03)
