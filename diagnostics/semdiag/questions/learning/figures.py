"""The section ``learning`` of a report: accuracy and loss against epochs."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.training_runs import TARGET
from semdiag.presenting.drawing.panels import POINTS, NothingToDrawError
from semdiag.presenting.drawing.style import FAINT, decades, finished, panel_grid, panel_inches, paper_style
from semdiag.presenting.section import Heading, Section, Shown
from semdiag.questions.learning.answer import Run, learning_glance, learning_in_short, training_runs

_NUMBER = 0.3  # inches that the number of an epoch takes


@paper_style
def training_curves(findings: Findings) -> Figure:
    """Draw training and held-out accuracy and loss per epoch, with the arrival at 95% training accuracy."""
    groups = training_runs(findings)
    if not groups:
        raise NothingToDrawError("No model has a training history.")
    figure, axes = panel_grid(len(_COLUMNS) * len(groups), height=2.3, sharey=False, columns=len(_COLUMNS))
    for place, (panel, runs) in enumerate(groups):
        row = axes[len(_COLUMNS) * place : len(_COLUMNS) * (place + 1)]
        for ax, (column, name) in zip(row, _COLUMNS.items(), strict=True):
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
        row[0].set_title(f"{panel.title}: {_COLUMNS['train_accuracy']}")
    return finished(
        figure,
        "marker and number on the 95% line: first epoch with that training accuracy; none: it was not reached",
    )


_COLUMNS = {
    "train_accuracy": "training accuracy",
    "holdout_accuracy": "held-out accuracy",
    "train_loss": "training loss (nats)",
}


def _draw_curve(ax: Axes, run: Run, column: str) -> None:
    if column not in run.history:
        return
    chosen = np.unique(np.linspace(0, len(run.history) - 1, min(POINTS, len(run.history))).round().astype(int))
    rows, style = run.history.iloc[chosen], run.series.style
    ax.plot(
        [], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4, label=run.series.label
    )
    marker = "." if len(rows) == 1 else ""  # a line through one point is invisible
    ax.plot(
        rows["epoch"], rows[column], color=style.color, linestyle=style.line, linewidth=1.3, marker=marker,
    )  # fmt: skip


def _mark_arrivals(ax: Axes, runs: list[Run]) -> None:
    ax.axhline(TARGET, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)))
    room = _NUMBER * (ax.get_xlim()[1] - ax.get_xlim()[0]) / panel_inches(ax)
    last, line = -math.inf, 0
    for epoch, style in sorted(((r.arrival, r.series.style) for r in runs if r.arrival), key=lambda one: one[0]):
        line = line + 1 if epoch - last < room else 0  # below the number before, where they would overlap
        last = epoch
        ax.plot(epoch, TARGET, marker=style.marker, color=style.color, markersize=6)
        ax.annotate(
            f"{epoch}", (epoch, TARGET), xytext=(2, -4 - 8 * line), textcoords="offset points", fontsize=7,
            color=style.color, va="top", path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip


_HEADINGS = (
    Heading(
        "learning",
        "Did it learn faster?",
        (
            Shown(
                training_curves,
                "Training and held-out accuracy and training loss against epochs, first epoch with 95% training "
                "accuracy marked: {shown}.",
                "Compare where the curves of the first panel cross the dashed line: the first epoch with 95% "
                "training accuracy. How far a curve of the second panel stays below that of the first is what was "
                "memorised instead of learned.",
            ),
        ),
        (
            "One run per curve: a different seed can shift the arrival by many epochs. A smaller dispersion "
            "and faster learning seen together in one pair do not show that one causes the other.",
            "Epochs are counted, not seconds: an epoch does not cost the same for every attention.",
        ),
    ),
)


SECTION = Section(
    name="learning",
    needs=(),
    headings=_HEADINGS,
    external=(),
    glance=learning_glance,
    in_short=learning_in_short,
)
