"""The evaluated cells of a landscape as arrays, one plane of one model at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.findings import Findings
from semdiag.presenting.drawing.panels import NothingToDrawError, Series, panels_of

_LOGARITHMIC = 30.0  # largest over smallest value, from which on colours and heights are logarithmic


@dataclass(frozen=True, eq=False)
class PlaneCells:
    """One plane of one model."""

    title: str  # task, seed and attention in words
    series: Series  # the model
    plane: int  # its number
    x: NDArray[np.float64]  # (columns,) coordinates of the cells
    y: NDArray[np.float64]  # (rows,) coordinates of the cells
    rows: pd.DataFrame  # the table's rows of the grid, y by y
    checkpoint: "pd.Series[Any]"  # its row
    samples: int  # behind every value

    def values(self, quantity: str) -> NDArray[np.float64]:
        """Return a quantity on the grid, (rows, columns); NaN where it is not finite."""
        array = self.rows[quantity].to_numpy(float).reshape(len(self.y), len(self.x))
        return np.where(np.isfinite(array), array, np.nan)


def plane_cells(findings: Findings, quantity: str) -> list[PlaneCells]:
    """Return every plane of every model on which a quantity was measured, full attention first."""
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
                        x=x,
                        y=y,
                        rows=grid,
                        checkpoint=rows[rows["place"] == "checkpoint"].iloc[0],
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


def plane_facts(findings: Findings, cells: list[PlaneCells]) -> str:
    """Return the conditions of the cells, in words for a figure."""
    first = cells[0]
    grid = f"{len(first.x)} × {len(first.y)} cells"
    samples = f"{min(c.samples for c in cells)} samples"
    planes = len({c.plane for c in cells})
    how = f"{counted(planes, 'random plane')}, each tensor's direction as long as the tensor"
    seed = findings.measurements.provenance.get("seed")
    how += "" if seed is None else f" (seed {seed})"
    return (
        f"{how}; {grid}, each one model that was run on {samples}, deterministic: there is no sampling interval "
        "within a plane. ‖θ‖: length of all parameters of the checkpoint"
    )
