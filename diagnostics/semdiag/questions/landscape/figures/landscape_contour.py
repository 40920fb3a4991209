"""Loss and accuracy on planes through a checkpoint: one coloured cell per model that was run."""

from collections.abc import Hashable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.style import INK, finished, panel_grid, paper_style, title_with_facts
from semdiag.questions.landscape.figures.panels import (
    PlaneCells,
    common_scale,
    name_axes,
    plane_cells,
    plane_facts,
)

_LEVELS = 8
_OTHER_MARKERS = ("o", "^")
_LETTERS = "AB"  # of the two snapshots that a plane passes through


@paper_style
def landscape_contour(findings: Findings) -> Figure:
    """Draw the loss and the accuracy of every plane side by side, with contour lines over the loss.

    Returns:
        Two panels per plane and model; one colour scale per quantity.

    Raises:
        NothingToDrawError: if the loss was measured on no plane.
    """
    cells = plane_cells(findings, "loss")
    return draw_planes(
        cells,
        {"loss": ("cross-entropy (nats)", "viridis_r"), "accuracy": ("accuracy", "cividis")},
        f"{plane_facts(findings, cells)}.\nColours are the evaluated cells themselves; contour lines of the "
        "first quantity, at the same values everywhere, are interpolated between them.",
    )


def draw_planes(cells: list[PlaneCells], quantities: dict[str, tuple[str, str]], note: str) -> Figure:
    """Draw quantities of planes side by side."""
    figure, axes = panel_grid(len(cells) * len(quantities), height=3.2, columns=len(quantities), sharey=False)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches; square cells let two rows meet
    scales = {name: common_scale(cells, name) for name in quantities}
    places = [(plane, name) for plane in cells for name in quantities]
    for ax, (plane, name) in zip(axes, places, strict=True):
        label, colors = quantities[name]
        image = _cells(ax, plane, name, scales[name], colors, contours=name == next(iter(quantities)))
        bar = figure.colorbar(image, ax=ax, shrink=0.85, pad=0.02)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=7)
        title = plane.title if plane.kind == "through" else f"{plane.title}, plane {plane.plane}"
        title_with_facts(ax, title if name == next(iter(quantities)) else label, _facts(plane, name))
    return finished(figure, note)


def _cells(ax: Axes, plane: PlaneCells, name: str, scale: Normalize, colors: str, *, contours: bool) -> Any:
    values = plane.values(name)
    shown = np.where(values > 0, values, scale.vmin or 1.0) if isinstance(scale, LogNorm) else values
    shown = np.where(np.isnan(values), np.nan, shown)
    colormap = matplotlib.colormaps[colors].with_extremes(bad="#cc4444")
    image = ax.pcolormesh(plane.x, plane.y, shown, norm=scale, cmap=colormap, shading="nearest", rasterized=True)
    low, high = float(scale.vmin or 0.0), float(scale.vmax or 1.0)
    levels = (np.geomspace if isinstance(scale, LogNorm) else np.linspace)(low, high, _LEVELS + 2)[1:-1]
    if contours and ((levels > np.nanmin(shown)) & (levels < np.nanmax(shown))).any():
        ax.contour(plane.x, plane.y, shown, levels=levels, colors=INK, linewidths=0.4, alpha=0.7)
    for (letter, row), marker in zip(_marks(plane), ("X", *_OTHER_MARKERS), strict=False):
        place = f"{letter}: {row['place']}" if letter else row["place"]
        ax.plot(
            row["x"], row["y"], marker=marker, color="white", markeredgecolor=INK, markersize=7, linestyle="none",
            label=place, zorder=4,
        )  # fmt: skip
    ax.grid(visible=False)
    ax.set_aspect("equal", adjustable="box")
    name_axes(ax, plane)
    return image


def _marks(plane: PlaneCells) -> list[tuple[str, dict[Hashable, Any]]]:
    """Return the checkpoint, then the snapshots with their letters."""
    return list(zip(("", *_LETTERS), plane.marks.to_dict("records"), strict=False))


def _facts(plane: PlaneCells, name: str) -> list[str]:
    values = plane.values(name)
    marks = "; ".join(f"{letter or 'checkpoint'} {row[name]:.3g}" for letter, row in _marks(plane))
    return [f"cells {np.nanmin(values):.3g} to {np.nanmax(values):.3g}", marks]
