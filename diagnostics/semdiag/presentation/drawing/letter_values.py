"""Nested boxes from percentiles: a distribution with a heavy tail in a handful of shapes."""

from collections.abc import Hashable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from semdiag.presentation.drawing.style import AttentionStyle, lightened, plain_numbers

# (lower percentile, upper percentile, share of the full width, share of white), drawn from the outside in.
_BOXES = (("p1", "p99", 0.25, 0.75), ("p5", "p95", 0.5, 0.55), ("p10", "p90", 0.75, 0.3), ("p25", "p75", 1.0, 0.0))
READING = "boxes from the inside out: 25–75, 10–90, 5–95, 1–99 % of the queries; white line: median"


def draw_letter_values(
    ax: Axes, x: float, width: float, table: Mapping[Hashable, float], style: AttentionStyle, extreme: str = "p100"
) -> None:
    """Draw the percentiles of one set of queries as nested boxes, its median and one extreme.

    What lies at or below 0 falls below a logarithmic axis: the boxes are cut there, not moved.

    Args:
        ax: with a scale already set.
        x: centre of the boxes.
        width: of the innermost box.
        table: ``p1`` … ``p99``, ``p50`` and ``extreme``; nothing is drawn if they are NaN.
        style: of the attention kind.
        extreme: the percentile marked as a point.
    """
    if not np.isfinite(table["p50"]):
        return
    floor = ax.get_ylim()[0]
    logarithmic = ax.get_yscale() == "log"
    for low, high, share, white in _BOXES:
        bottom, top = table[low], table[high]
        if logarithmic:
            bottom, top = max(bottom, floor), max(top, floor)
        if top > bottom or not logarithmic:
            box = Rectangle((x - width * share / 2, bottom), width * share, top - bottom)
            box.set(facecolor=lightened(style.color, white), edgecolor="white", linewidth=0.3)
            ax.add_patch(box)
    if table["p50"] > floor:
        ax.plot(
            [x - width / 2, x + width / 2], [table["p50"]] * 2, color="white", linewidth=1.4, solid_capstyle="butt"
        )
    if table[extreme] > floor:
        ax.plot(x, table[extreme], marker=style.marker, color=style.color, markersize=3.2, linestyle="none")


def legend_entry(ax: Axes, label: str, style: AttentionStyle) -> None:
    """Add an invisible line that brings a filled marker of this style into the legend.

    Args:
        ax: the panel.
        label: for the legend.
        style: of the attention kind.
    """
    ax.plot([], [], marker=style.marker, color=style.color, linestyle="none", markersize=6, label=label)


def logarithmic_limits(ax: Axes, low: float, high: float) -> None:
    """Set a logarithmic ordinate with a little room at both ends.

    Args:
        ax: the panel.
        low: smallest positive value to be seen.
        high: largest value.
    """
    ax.set_yscale("log")
    ax.set_ylim(low / 1.3, high * 1.5)
    plain_numbers(ax.yaxis)
