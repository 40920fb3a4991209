"""A whole training as a monitor saw it: layers against steps."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from semdiag.presenting.drawing.heat_map import heat_map, name_cells
from semdiag.presenting.drawing.panels import NothingToDrawError
from semdiag.presenting.drawing.style import note_below, panel_grid, paper_style

# Quantity, whether each layer shows its largest or its smallest head, and the title.
_PANELS = (
    ("max_logit", "max", "largest score of any head (nats)"),
    ("entropy", "min", "smallest mean entropy of any head (nats)"),
    ("first_key", "max", "largest mean weight on the first key"),
    ("dispersion", "max", "largest median dispersion δ (nats)"),
)
_ALARM = "#d55e00"
_FAR = 30  # ratio of largest to smallest value above which colours are logarithmic


@paper_style
def monitored_run(rows: pd.DataFrame) -> Figure:
    """Draw heat maps of layers against steps, with the first alarm of each layer marked."""
    if rows.empty:
        raise NothingToDrawError("The file has no rows: no step was looked at.")
    pairs = zip(rows["layer"].tolist(), rows["occurrence"].astype(int).tolist(), strict=True)
    rows = rows.assign(place=pd.Series([*pairs], index=rows.index, dtype=object))
    steps, places = sorted(rows["step"].unique()), sorted(rows["place"].unique())
    figure, axes = panel_grid(len(_PANELS), height=0.9 + 0.16 * len(places), sharey=False, columns=2)
    marked = False
    for ax, (name, how, title) in zip(axes, _PANELS, strict=True):
        groups = rows.groupby(["place", "step"])[name]
        table = (groups.max() if how == "max" else groups.min()).unstack("step")
        _draw(ax, table.reindex(index=places, columns=steps).to_numpy(float))
        name_cells(ax.xaxis, steps, 6)
        name_cells(ax.yaxis, [f"{layer}.{call}" if call else str(layer) for layer, call in places])
        ax.set_xlabel("step")
        ax.set_ylabel("layer")
        crossed = rows[rows["alarm"].str.contains(rf"\b{name}:")]
        first = crossed.groupby("place")["step"].min()
        if len(first):
            x, y = [steps.index(step) for step in first], [places.index(place) for place in first.index]
            ax.plot(x, y, linestyle="none", marker="x", color=_ALARM, markersize=6, markeredgewidth=2)
            marked = True
        ax.set_title(title, fontsize=8)
    crosses = " Crosses: the first alarm of a layer." if marked else ""
    note_below(figure, f"A cell is the head of a layer that is furthest out. Grey: no finite value.{crosses}")
    return figure


def _draw(ax: Axes, cells: np.ndarray) -> None:
    finite = cells[np.isfinite(cells)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    far = low > 0 and high > _FAR * low
    scale = LogNorm(low, high) if far else Normalize(min(0.0, low), high if high > min(0.0, low) else 1.0)
    heat_map(ax, np.where(np.isfinite(cells), cells, np.nan), scale)
