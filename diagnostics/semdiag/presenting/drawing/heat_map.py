"""Coloured cells with a colour bar."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Normalize

from semdiag.presenting.drawing.style import plain_numbers

_LIGHT = 0.55


def heat_map(ax: Axes, cells: np.ndarray, scale: Normalize, text: Callable[[float], str] | None = None) -> None:
    """Draw cells, grey where they are not finite, with a colour bar."""
    image = ax.imshow(cells, cmap="cividis", norm=scale, aspect="auto", interpolation="none")
    ax.set_facecolor("#bbbbbb")
    ax.grid(visible=False)
    for (row, column), value in np.ndenumerate(cells) if text else ():
        if text and np.isfinite(value):
            color = ink(scale(max(value, scale.vmin or 0)))
            ax.text(column, row, text(value), ha="center", va="center", fontsize=6, color=color)
    bar = ax.figure.colorbar(image, ax=ax, pad=0.01, aspect=12)
    bar.ax.tick_params(labelsize=7)
    plain_numbers(bar.ax.yaxis)


def ink(share: float) -> str:
    """Return the colour of a cell's text, by its share of the scale: cividis is dark below and light above."""
    return "black" if share > _LIGHT else "white"


def name_cells(axis: Axis, names: Sequence[object], most: int = 12) -> None:
    """Name the rows or columns of cells, every second, third … of them where there are more than ``most``."""
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
