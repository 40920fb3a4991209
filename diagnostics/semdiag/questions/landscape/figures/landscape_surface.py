"""The loss on planes through a checkpoint as a surface."""

import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.style import INK, PageFigure, note_below, page_width, paper_style
from semdiag.questions.landscape.figures.panels import (
    PlaneCells,
    axis_names,
    common_scale,
    plane_cells,
    plane_facts,
)


@paper_style
def landscape_surface(findings: Findings) -> Figure:
    """Draw the loss of every plane as a surface with one corner per evaluated cell, all on one scale.

    Returns:
        One panel per plane and model.

    Raises:
        NothingToDrawError: if the loss was measured on no plane.
    """
    cells = plane_cells(findings, "loss")
    columns = min(len(cells), 2) if page_width() > 5 else 1
    rows = math.ceil(len(cells) / columns)
    figure = PageFigure(figsize=(page_width(), 4.0 * rows + 0.7), layout="constrained")
    logarithmic = isinstance(common_scale(cells, "loss"), LogNorm)
    heights = [_heights(c, logarithmic=logarithmic) for c in cells]
    low, high = min(np.nanmin(h) for h in heights), max(np.nanmax(h) for h in heights)
    for place, (plane, height) in enumerate(zip(cells, heights, strict=True)):
        ax: Any = figure.add_subplot(rows, columns, place + 1, projection="3d")
        _draw(ax, plane, height, (low, high if high > low else low + 1.0))
        ax.set_zlabel("log10 of cross-entropy (nats)" if logarithmic else "cross-entropy (nats)", fontsize=7)
    note_below(
        figure,
        f"{plane_facts(findings, cells)}.\nEvery corner of the mesh is an evaluated cell; the facets between "
        "are flat and no data. Cross: the checkpoint.",
    )
    return figure


def _heights(plane: PlaneCells, *, logarithmic: bool) -> np.ndarray:
    values = plane.values("loss")
    if not logarithmic:
        return values
    smallest = np.nanmin(np.where(values > 0, values, np.nan))
    heights: np.ndarray = np.log10(np.maximum(values, smallest))
    return heights


def _draw(ax: Any, plane: PlaneCells, height: np.ndarray, limits: tuple[float, float]) -> None:
    low, high = limits
    x, y = np.meshgrid(plane.x, plane.y)
    colors = matplotlib.colormaps["viridis_r"]
    ax.plot_surface(
        x, y, height, cmap=colors, vmin=low, vmax=high, linewidth=0.15, edgecolor=INK, rcount=200, ccount=200,
        antialiased=True,
    )  # fmt: skip
    row, column = int(np.abs(plane.y).argmin()), int(np.abs(plane.x).argmin())
    ax.plot([0], [0], [height[row, column]], marker="X", color="white", markeredgecolor=INK, zorder=10)
    ax.set_zlim(low, high)
    across, up = axis_names(plane.kind)
    for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
        axis.set_major_locator(MaxNLocator(4))
        axis.labelpad = 7
    ax.set_xlabel(across, fontsize=7)
    ax.set_ylabel(up, fontsize=7)
    ax.tick_params(labelsize=6, pad=0)
    ax.view_init(elev=32, azim=-60)
    ax.set_box_aspect((4, 4, 3), zoom=0.82)
    title = plane.title if plane.kind == "through" else f"{plane.title}, plane {plane.plane}"
    ax.set_title(title, loc="left", y=0.97)
