"""Rank correlations of what may predict speed with the speed-up itself."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.findings.findings import Findings
from semdiag.findings.prediction import SIGNIFICANCE, predictor_table
from semdiag.measurement.runs.predictors import CANDIDATES, STAGES
from semdiag.presentation.drawing.panels import NothingToDrawError
from semdiag.presentation.drawing.style import FAINT, INK, note_below, panel_grid, paper_style


@paper_style
def predictors(findings: Findings) -> Figure:
    """Draw the rank correlation of every candidate at every stage, with its interval.

    Args:
        findings: with runs and predictors.

    Returns:
        One panel per stage, one row per candidate.

    Raises:
        NothingToDrawError: if nothing is comparable.
    """
    table = findings(predictor_table)
    if table.empty or table["tau"].isna().all():
        raise NothingToDrawError("No two runs have a certain order of speed-ups: nothing can be correlated.")
    figure, axes = panel_grid(len(STAGES), height=4.4)
    for ax, stage in zip(axes, STAGES, strict=True):
        _draw(ax, table[table["stage"] == stage])
        ax.set_title(stage)
        ax.set_xlabel("rank correlation τ with speed-up")
    axes[0].set_yticks(range(len(CANDIDATES)), list(CANDIDATES.values()))
    axes[0].set_ylim(len(CANDIDATES) - 0.4, -0.6)
    interval = "bars: 95 % intervals (tasks and seeds resampled); " if table["low"].notna().any() else ""
    note_below(
        figure,
        f"numbers are ratios to full attention of the same task, seed and stage; {interval}filled: "
        f"p < {SIGNIFICANCE:g} after correction for all {int(table['tau'].notna().sum())} correlations "
        "(attentions exchanged within tasks); no point: nothing comparable",
    )
    return figure


def _draw(ax: Axes, rows: pd.DataFrame) -> None:
    ax.grid(axis="x")
    ax.axvline(0.0, color=FAINT, linewidth=1.0, linestyle=(0, (4, 2)), zorder=0)
    ax.set_xlim(-1.08, 1.08)
    for row in rows.dropna(subset="tau").to_dict("records"):
        place = [*CANDIDATES].index(row["candidate"])
        ax.plot([row["low"], row["high"]], [place, place], color=INK, linewidth=1.1, zorder=1)
        filled = row["p_corrected"] < SIGNIFICANCE
        ax.plot(row["tau"], place, "o", color=INK, markerfacecolor=INK if filled else "white", zorder=2)
