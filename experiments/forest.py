"""Forest plots of ratios with their intervals, for screens and telephones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from semdiag.presenting.drawing.style import FAINT, INK, save_figure, stacked

Values = NDArray[np.float64]


def draw_row(
    ax: Axes, rows: Values, middle: Values, low: Values, high: Values, marker: str, colour: str, beside: float,
    label: str | None,
) -> None:  # fmt: skip
    """Draw a point with its interval beside each of these rows."""
    ax.errorbar(
        middle, rows + beside, xerr=[middle - low, high - middle], linestyle="none", marker=marker,
        color=colour, markersize=4, linewidth=1.2, capsize=2, label=label,
    )  # fmt: skip


def label_rows(ax: Axes, names: list[str], first: bool, equal: float = 0.0) -> None:
    """Name the rows, the first name on top, in the first panel; and draw the line of no difference."""
    ax.axvline(equal, color=INK, linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(names)), names[::-1])
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.tick_params(labelleft=first)
    ax.grid(visible=False)


def in_times(ax: Axes, ticks: list[float], low: float, high: float) -> None:
    """Make the axis one of ratios: logarithmic, labelled × 0.5, × 1, × 2."""
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"× {value:,g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(axis="x")


def name_sides(ax: Axes, left: str, right: str) -> None:
    """Say above a panel what lies left and right of 1."""
    for text, place, side in ((f"← {left}", 0.0, "left"), (f"{right} →", 1.0, "right")):
        ax.text(place, 1.01, text, transform=ax.transAxes, ha=side, va="bottom", fontsize=9, color=FAINT)


def save(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG, with dark colours for dark pages: one for screens, one for telephones."""
    folder.mkdir(parents=True, exist_ok=True)
    wide = save_figure(draw(), folder / name, ["svg"])
    with stacked():
        return wide + save_figure(draw(), folder / f"{name}-narrow", ["svg"])
