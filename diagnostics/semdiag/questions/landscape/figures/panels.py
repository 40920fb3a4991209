"""The evaluated cells of a landscape as arrays, one plane of one model at a time."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Series, panels_of

_LOGARITHMIC = 30.0  # largest over smallest value, from which on colours and heights are logarithmic


@dataclass(frozen=True, eq=False)
class PlaneCells:
    """One plane of one model.

    Attributes:
        title: task, seed and attention in words.
        series: the model.
        plane: its number.
        kind: random or through.
        x: (columns,) coordinates of the cells.
        y: (rows,) coordinates of the cells.
        rows: the table's rows of the grid, y by y.
        marks: the rows of the checkpoint and the snapshots.
        samples: behind every value.
    """

    title: str
    series: Series
    plane: int
    kind: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    rows: pd.DataFrame
    marks: pd.DataFrame
    samples: int

    def values(self, quantity: str) -> NDArray[np.float64]:
        """Return a quantity on the grid, (rows, columns); NaN where it is not finite."""
        array = self.rows[quantity].to_numpy(float).reshape(len(self.y), len(self.x))
        return np.where(np.isfinite(array), array, np.nan)


def plane_cells(findings: Findings, quantity: str) -> list[PlaneCells]:
    """Return every plane of every model on which a quantity was measured, full attention first.

    Raises:
        NothingToDrawError: if there is none.
    """
    table = findings.measurements.landscape
    planes = []
    for panel in panels_of(findings.measurements.models):
        for series in panel.series:
            for number, rows in table[table["model"] == series.model].groupby("plane", sort=True):
                grid = rows[rows["place"] == "grid"].sort_values(["y", "x"], kind="stable")
                x, y = (np.unique(grid[name]) for name in ("x", "y"))
                if not np.isfinite(grid[quantity]).any():
                    continue
                planes.append(
                    PlaneCells(
                        title=f"{panel.title}, {series.label}",
                        series=series,
                        plane=int(str(number)),
                        kind=str(rows["kind"].iloc[0]),
                        x=x,
                        y=y,
                        rows=grid,
                        marks=rows[rows["place"] != "grid"],
                        samples=int(rows["samples"].iloc[0]),
                    )
                )
    if not planes:
        raise NothingToDrawError(f"The {quantity.split('_')[0]} was not measured on any plane.")
    return planes


def common_scale(cells: list[PlaneCells], quantity: str) -> Normalize:
    """Return one scale for a quantity on all planes; logarithmic if it spans more than a factor of 30."""
    values = np.concatenate([c.values(quantity).ravel() for c in cells])
    values = values[np.isfinite(values)]
    if not values.size:
        return Normalize(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if low >= 0 and positive.size and high > _LOGARITHMIC * float(positive.min()):
        return LogNorm(float(positive.min()), high)
    return Normalize(low, high if high > low else low + 1.0)


def axis_names(kind: str) -> tuple[str, str]:
    """Return labels of abscissa and ordinate."""
    if kind == "through":
        return "towards A, in ‖θ‖", "across, in ‖θ‖"
    return "first direction, in ‖θ‖", "second direction, in ‖θ‖"


def name_axes(ax: Axes, cells: PlaneCells) -> None:
    """Label the axes of a plane."""
    across, up = axis_names(cells.kind)
    ax.set_xlabel(across)
    ax.set_ylabel(up)


def plane_facts(findings: Findings, cells: list[PlaneCells]) -> str:
    """Return the conditions of the cells, in words for a figure."""
    first = cells[0]
    grid = f"{len(first.x)} × {len(first.y)} cells"
    samples = f"{min(c.samples for c in cells)} samples"
    if first.kind == "through":
        how = "plane through the checkpoint and two snapshots, all run with the checkpoint's own attention"
    else:
        planes = len({c.plane for c in cells})
        how = f"{counted(planes, 'random plane')}, each tensor's direction as long as the tensor"
        seed = findings.measurements.provenance.get("seed")
        how += "" if seed is None else f" (seed {seed})"
    return (
        f"{how}; {grid}, each one model that was run on {samples}, deterministic: there is no sampling interval "
        "within a plane. ‖θ‖: length of all parameters of the checkpoint"
    )
