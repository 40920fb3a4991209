"""Rank correlations of what may predict learning with the area under the loss curve."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import FAINT, INK, note_below, panel_grid, paper_style
from semdiag.questions.predictors.answer.mask_cells import OUTCOMES, STAGES
from semdiag.questions.predictors.answer.prediction import SIGNIFICANCE, predictor_table, quantity


@paper_style
def predictors(findings: Findings) -> Figure:
    """Draw the rank correlation of every candidate at every stage with the primary outcome, with its interval.

    Returns:
        One panel per stage, one row per candidate.

    Raises:
        NothingToDrawError: if nothing is comparable.
    """
    table = findings(predictor_table)
    table = table[table["outcome"] == next(iter(OUTCOMES))]
    if table.empty or table["rho"].isna().all():
        raise NothingToDrawError("No task has 5 masks for which all candidates are known.")
    names = [*table["candidate"].unique()]
    figure, axes = panel_grid(len(STAGES), height=1.2 + 0.25 * len(names))
    for ax, stage in zip(axes, STAGES, strict=True):
        _draw(ax, table[table["stage"] == stage], names)
        ax.set_title(stage)
        ax.set_xlabel("rank correlation ρ (right: slower)")
    axes[0].set_yticks(range(len(names)), [quantity(name) for name in names])
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    first = table.iloc[0]
    note_below(
        figure,
        f"Spearman's ρ with the {OUTCOMES[first['outcome']]}, mean over {first['tasks']} tasks, {first['cells']} "
        "cells of task × mask, seeds averaged; bars: 95% intervals (masks resampled); filled: p < "
        f"{SIGNIFICANCE:g} after correction for all {int(table['rho'].notna().sum())} correlations (masks "
        "relabelled alike in all tasks)",
    )
    return figure


def _draw(ax: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    ax.grid(axis="x")
    ax.axvline(0.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)), zorder=0)
    ax.set_xlim(-1.08, 1.08)
    for row in rows.dropna(subset="rho").to_dict("records"):
        place = names.index(row["candidate"])
        ax.plot([row["low"], row["high"]], [place, place], color=INK, linewidth=1.1, zorder=1)
        filled = row["p_corrected"] < SIGNIFICANCE
        ax.plot(row["rho"], place, "o", color=INK, markerfacecolor=INK if filled else "white", zorder=2)
