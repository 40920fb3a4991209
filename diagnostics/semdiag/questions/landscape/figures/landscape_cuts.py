"""Loss and accuracy along the axes of planes through a checkpoint: full attention and its counterparts."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.style import finished, panel_grid, paper_style, title_with_facts
from semdiag.questions.landscape.figures.panels import PlaneCells, common_scale, plane_cells, plane_facts


@paper_style
def landscape_cuts(findings: Findings) -> Figure:
    """Draw loss and accuracy along both axes of every plane, models of a task and seed on the same axes."""
    cells = plane_cells(findings, "loss")
    titles = list(dict.fromkeys(_panel(c) for c in cells))
    logarithmic = isinstance(common_scale(cells, "loss"), LogNorm)
    figure, axes = panel_grid(2 * len(titles), height=2.7, columns=2, sharey=False)
    for place, title in enumerate(titles):
        planes = [c for c in cells if _panel(c) == title]
        for ax, quantity in zip(axes[2 * place : 2 * place + 2], ("loss", "accuracy"), strict=True):
            _draw(ax, planes, quantity)
            title_with_facts(ax, f"{title}, {quantity}", [_count(planes)])
            ax.set_xlabel("distance from the checkpoint, in ‖θ‖")
            ax.xaxis.set_major_locator(MaxNLocator(6))
        axes[2 * place].set_ylabel("cross-entropy (nats)")
        axes[2 * place + 1].set_ylabel("accuracy")
        axes[2 * place + 1].set_ylim(-0.02, 1.02)
        if logarithmic:
            axes[2 * place].set_yscale("log")
    return finished(
        figure, f"{plane_facts(findings, cells)}. Points are evaluated cells; lines between them guide the eye."
    )


def _panel(cells: PlaneCells) -> str:
    return cells.title.removesuffix(f", {cells.series.label}")


def _count(planes: list[PlaneCells]) -> str:
    cuts = len([cut for c in planes for cut in _cuts(c)]) // len({c.series.model for c in planes})
    return f"{cuts} cuts per model, {planes[0].samples} samples"


def _draw(ax: Axes, planes: list[PlaneCells], quantity: str) -> None:
    named: set[str] = set()
    for plane in planes:
        style = plane.series.style
        for distances, rows in _cuts(plane):
            values = rows[quantity].to_numpy(float)
            label = plane.series.label if plane.series.label not in named else "_again"
            named.add(plane.series.label)
            values = np.where(values > 0, values, np.nan) if quantity == "loss" else values
            ax.plot(
                distances, values, color=style.color, linestyle=style.line, linewidth=0.8 * style.width,
                marker=style.marker, markersize=2.5, label=label,
            )  # fmt: skip
    ax.axvline(0, color="#bbbbbb", linewidth=0.7, zorder=0)


def _cuts(plane: PlaneCells) -> Iterator[tuple[np.ndarray, pd.DataFrame]]:
    """Yield distances from the checkpoint and rows along both axes; exact, since every grid contains 0."""
    for axis, fixed in (("x", "y"), ("y", "x")):
        rows = plane.rows[plane.rows[fixed] == 0].sort_values(axis)
        yield rows[axis].to_numpy(float), rows
