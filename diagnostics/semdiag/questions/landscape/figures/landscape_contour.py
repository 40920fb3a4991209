"""Loss and accuracy on planes through a checkpoint: one coloured cell per model that was run."""

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
    plane_cells,
    plane_facts,
)

_LEVELS = 8
_QUANTITIES = {"loss": ("cross-entropy (nats)", "viridis_r"), "accuracy": ("accuracy", "cividis")}


@paper_style
def landscape_contour(findings: Findings) -> Figure:
    """Draw the loss and the accuracy of every plane side by side, with contour lines over the loss."""
    cells = plane_cells(findings, "loss")
    figure, axes = panel_grid(len(cells) * len(_QUANTITIES), height=3.2, columns=len(_QUANTITIES), sharey=False)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches; square cells let two rows meet
    scales = {name: common_scale(cells, name) for name in _QUANTITIES}
    places = [(plane, name) for plane in cells for name in _QUANTITIES]
    for ax, (plane, name) in zip(axes, places, strict=True):
        label, colors = _QUANTITIES[name]
        image = _cells(ax, plane, name, scales[name], colors, contours=name == "loss")
        bar = figure.colorbar(image, ax=ax, shrink=0.85, pad=0.02)
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=7)
        title_with_facts(
            ax, f"{plane.title}, plane {plane.plane}" if name == "loss" else label, _facts(plane, name)
        )
    return finished(
        figure,
        f"{plane_facts(findings, cells)}.\nColours are the evaluated cells themselves; contour lines of the "
        "first quantity, at the same values everywhere, are interpolated between them.",
    )


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
    ax.plot(
        0, 0, marker="X", color="white", markeredgecolor=INK, markersize=7, linestyle="none", label="checkpoint",
        zorder=4,
    )  # fmt: skip
    ax.grid(visible=False)
    ax.set_aspect("equal", adjustable="box")
    ax.set_xlabel("first direction, in ‖θ‖")
    ax.set_ylabel("second direction, in ‖θ‖")
    return image


def _facts(plane: PlaneCells, name: str) -> list[str]:
    values = plane.values(name)
    cells = f"cells {np.nanmin(values):.3g} to {np.nanmax(values):.3g}"
    return [cells, f"checkpoint {plane.checkpoint[name]:.3g}"]
