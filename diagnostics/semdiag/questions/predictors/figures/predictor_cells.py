"""Learning against what may predict it, mask by mask."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import attention_style, finished, panel_grid, paper_style
from semdiag.questions.predictors.answer.mask_cells import OUTCOMES, STAGES, mask_cells
from semdiag.questions.predictors.words import short

_COLUMNS = 4


@paper_style
def predictor_cells(findings: Findings) -> Figure:
    """Draw every task × mask at its ranks, within the task, by a candidate at the initialisation and by outcome.

    Raises:
        NothingToDrawError: if no task has two masks of which a candidate is known.
    """
    table, outcome = findings(mask_cells), next(iter(OUTCOMES))
    table = table[(table["stage"] == STAGES[0]) & table["ln_value"].notna()]
    tasks = table.groupby(["candidate", "group"], sort=False)
    x, y, masks = tasks["ln_value"].rank(), tasks[outcome].rank(), tasks["ln_value"].transform("size")
    table = table.assign(x=x, y=y, masks=masks)
    table = table[table["masks"] > 1]
    if table.empty:
        raise NothingToDrawError("No task has two masks for which a candidate is known.")
    shown = [*table["candidate"].unique()]
    figure, axes = panel_grid(len(shown), height=2.1, columns=_COLUMNS)
    for ax, candidate in zip(axes, shown, strict=True):
        _draw(ax, table[table["candidate"] == candidate])
        ax.set_title(short(candidate), fontsize=8)
    for ax in axes:
        ax.set_xlabel("candidate, rank", fontsize=7.5)
    for ax in axes[::_COLUMNS]:
        ax.set_ylabel("slowness, rank", fontsize=7.5)
    return finished(
        figure,
        "ranks among the masks of a task, from 0 (smallest) to 1; abscissa: the candidate at the initialisation, "
        f"ordinate: the {OUTCOMES[outcome]}, of which a large one is slow; seeds averaged, a point per "
        "task and mask",
    )


def _draw(ax: Axes, rows: pd.DataFrame) -> None:
    for row in rows.to_dict("records"):
        style = attention_style(row["kind"])
        x, y = ((row[name] - 1) / (row["masks"] - 1) for name in ("x", "y"))
        ax.plot(x, y, marker=style.marker, color=style.color, linestyle="none", label=row["attention"])
