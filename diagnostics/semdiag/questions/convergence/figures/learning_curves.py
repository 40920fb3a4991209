"""Accuracy against epochs over seeds: median, range, and when each run arrived."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.noise import percent
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import (
    FAINT,
    AttentionStyle,
    attention_style,
    finished,
    panel_grid,
    paper_style,
    title_with_facts,
)
from semdiag.questions.convergence.answer.epochs import arrivals, seed_curves
from semdiag.questions.convergence.words import arrival_words


@paper_style
def learning_curves(findings: Findings) -> Figure:
    """Draw median training accuracy over seeds with its range, single arrivals, and held-out accuracy."""
    table = findings(arrivals)
    table = table[table["epochs"] > 0]
    if table.empty:
        raise NothingToDrawError("No run has a finished epoch.")
    groups = [(str(group), runs) for group, runs in table.groupby("group", sort=False)]
    figure, axes = panel_grid(len(groups), height=3.0, sharey=False, columns=min(len(groups), 2))
    for ax, (group, runs) in zip(axes, groups, strict=True):
        facts, target = [], float(runs["target"].iloc[0])
        for attention, seeds in runs.groupby("attention", sort=False):
            style = attention_style(str(seeds["kind"].iloc[0]))
            _draw(ax, style, *seed_curves(findings, seeds, "train_accuracy"), 1.7)
            _draw(ax, style, *seed_curves(findings, seeds, "holdout_accuracy"), 0.7)
            ax.plot([], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=4,
                    label=str(attention))  # fmt: skip
            _mark(ax, style, seeds, target)
            facts.append(f"{attention}: {', '.join(arrival_words(run) for run in seeds.to_dict('records'))}")
        ax.axhline(target, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
        title_with_facts(ax, f"{group}: epochs to {percent(target)}", facts)
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        ax.set_ylim(top=1.03)
    for ax in axes[::2]:
        ax.set_ylabel("accuracy")
    return finished(
        figure,
        "above the panel: epochs to this training accuracy, seed by seed; markers: the same. thick: training, "
        "thin: held-out; from three seeds on the lower median, with their range as a band, in which a run that "
        "stopped at the target keeps its last accuracy",
    )


def _draw(ax: Axes, style: AttentionStyle, curves: pd.DataFrame, band: pd.DataFrame, width: float) -> None:
    epochs = curves.index
    for _, values in curves.items():
        ax.plot(
            epochs, values, color=style.color, linestyle=style.line, linewidth=width,
            marker="." if len(epochs) == 1 else "",
        )  # fmt: skip
    if len(band) and width > 1:
        ax.fill_between(epochs, band["low"], band["high"], color=style.color, alpha=0.18, linewidth=0)


def _mark(ax: Axes, style: AttentionStyle, runs: pd.DataFrame, target: float) -> None:
    arrived = runs["arrival"].dropna()
    ax.plot(
        arrived, [target] * len(arrived), marker=style.marker, color=style.color, markersize=5.5, linestyle="none",
        markeredgecolor="white", markeredgewidth=0.6, zorder=4,
    )  # fmt: skip
