"""Nested boxes from percentiles, for heavy-tailed distributions."""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import AttentionStyle, lightened, number_layers, panel_inches, plain_numbers

# (lower percentile, upper percentile, share of the full width, share of white), drawn from the outside in.
_BOXES = (("p1", "p99", 0.25, 0.75), ("p5", "p95", 0.5, 0.55), ("p10", "p90", 0.75, 0.3), ("p25", "p75", 1.0, 0.0))
_DISTINCT = 0.06  # inches of a box; of a narrower one colour alone tells the parts
READING = "boxes from the inside out: 25–75, 10–90, 5–95, 1–99% of the queries; white line: median"


def draw_letter_values(
    ax: Axes,
    x: float,
    width: float,
    table: Mapping[Hashable, float],
    style: AttentionStyle,
    extreme: str = "p100",
    *,
    narrow: bool = False,
) -> None:
    """Draw the percentiles of one set of queries as nested boxes, its median and one extreme."""
    if not np.isfinite(table["p50"]):
        return
    floor = ax.get_ylim()[0]
    logarithmic = ax.get_yscale() == "log"
    for low, high, share, white in _BOXES:
        bottom, top = table[low], table[high]
        if logarithmic:
            bottom, top = max(bottom, floor), max(top, floor)
        if top > bottom or not logarithmic:
            broad = width if narrow else width * share
            box = Rectangle((x - broad / 2, bottom), broad, top - bottom)
            box.set(facecolor=lightened(style.color, white), edgecolor="white", linewidth=0.3)
            ax.add_patch(box)
    if table["p50"] > floor:
        ax.plot(
            [x - width / 2, x + width / 2], [table["p50"]] * 2, color="white", linewidth=1.4, solid_capstyle="butt"
        )
    if table[extreme] > floor:
        ax.plot(
            x, table[extreme], marker=style.marker, color=style.color, markersize=3.0 if narrow else 4.2,
            markeredgecolor="white", markeredgewidth=0.5, linestyle="none", zorder=4,
        )  # fmt: skip


def layer_boxes(
    ax: Axes, boxes: Sequence[tuple[str, AttentionStyle, pd.DataFrame]], extreme: str = "p100"
) -> list[tuple[float, dict[Hashable, float], AttentionStyle]]:
    """Draw one group of boxes per layer, one box of each table, and number the layers from 0."""
    layers = sorted({int(layer) for _, _, table in boxes for layer in table["layer"]})
    width, drawn = 0.84 / max(len(boxes), 1), []
    narrow = width * panel_inches(ax) / max(len(layers), 1) < _DISTINCT
    for place, (label, style, table) in enumerate(boxes):
        ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", markersize=6, label=label)
        for row in table.to_dict("records"):
            x = row["layer"] + (place - (len(boxes) - 1) / 2) * width
            draw_letter_values(ax, x, 0.85 * width, row, style, extreme, narrow=narrow)
            drawn.append((x, row, style))
    number_layers(ax, layers)
    ax.set_xlim(min(layers, default=0) - 0.6, max(layers, default=0) + 0.6)
    return drawn


def logarithmic_limits(ax: Axes, low: float, high: float) -> None:
    """Set a logarithmic y axis with some room at both ends."""
    ax.set_yscale("log")
    ax.set_ylim(low / 1.3, high * 1.5)
    plain_numbers(ax.yaxis)


def positive_range(tables: pd.DataFrame, low: str, high: str) -> tuple[float, float]:
    """Return the smallest and the largest positive percentile, for a logarithmic axis."""
    nothing = "No query has a finite value above 0, so there is nothing to show on a logarithmic axis."
    tops = tables[high].to_numpy(float) if len(tables) else np.zeros(0)
    tops = tops[np.isfinite(tops) & (tops > 0)]
    if not tops.size:
        raise NothingToDrawError(nothing)
    for column in (low, "p5", "p25", "p50", "p95", high):
        bottoms = tables[column].to_numpy(float)
        bottoms = bottoms[np.isfinite(bottoms) & (bottoms > 0)]
        if bottoms.size:
            return float(bottoms.min()), float(tops.max())
    raise NothingToDrawError(nothing)
