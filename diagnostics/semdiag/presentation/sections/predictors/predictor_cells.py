"""Speed-up against what may predict it, run by run."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from semdiag.findings.findings import Findings
from semdiag.findings.prediction import prediction_cells
from semdiag.measurement.runs.predictors import CANDIDATES, STAGES
from semdiag.presentation.drawing.panels import NothingToDrawError
from semdiag.presentation.drawing.style import (
    FAINT,
    attention_style,
    legend_on_top,
    note_below,
    panel_grid,
    paper_style,
    plain_numbers,
)
from semdiag.presentation.sections.convergence.sentences import targets_sentence
from semdiag.presentation.sections.convergence.speed_up import draw_speed

_COLUMNS = 4


@paper_style
def predictor_cells(findings: Findings) -> Figure:
    """Draw every run at its speed-up and at the ratio of a candidate to full attention's at the initialisation.

    Args:
        findings: with runs and predictors.

    Returns:
        One panel per candidate, logarithmic ordinate.

    Raises:
        NothingToDrawError: if no speed-up is known, or no initialisation was measured.
    """
    table = findings(prediction_cells)
    table = table[(table["stage"] == STAGES[0]) & table["ln_ratio"].notna()]
    if table.empty:
        raise NothingToDrawError("There is no run of which a speed-up and an initialisation are known.")
    shown = [name for name in CANDIDATES if name in set(table["candidate"])]
    figure, axes = panel_grid(len(shown), height=2.1, columns=_COLUMNS)
    for ax, candidate in zip(axes, shown, strict=True):
        _draw(ax, table[table["candidate"] == candidate])
        ax.set_title(CANDIDATES[candidate].rsplit(",", 1)[0], fontsize=8)
    for ax in axes[::_COLUMNS]:
        ax.set_ylabel("speed-up over full attention", fontsize=7.5)
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain_numbers(axes[0].yaxis)
    legend_on_top(figure, axes)
    note_below(
        figure,
        f"{targets_sentence(findings)} abscissa: natural logarithm of the ratio to full attention of the same "
        "task and seed, both at their initialisation; hollow with arrow: only this bound of the speed-up is "
        "known, one run never arrived",
    )
    return figure


def _draw(ax: Axes, rows: pd.DataFrame) -> None:
    ax.set_yscale("log")
    for _, pair in rows.iterrows():
        style = attention_style(pair["kind"])
        draw_speed(ax, pair["ln_ratio"], pair, style)
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", label=pair["attention"])
    for line, at in ((ax.axvline, 0.0), (ax.axhline, 1.0)):
        line(at, color=FAINT, linewidth=0.9, linestyle=(0, (4, 2)), zorder=0)
