"""Landscapes in numbers, sentences and figures: how far from the checkpoint a model still works."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from semdiag.measuring.findings.findings import Findings, Summary, json_ready, records
from semdiag.measuring.words import counted, number_words, text
from semdiag.presenting.answer import Answer, Heading, measured_glance, title, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, Series, model_labels, panels_of
from semdiag.presenting.drawing.style import INK, drawing, finished, panel_grid, title_with_facts
from semdiag.presenting.tables import Column, NumberTable

WORKING = 0.95  # accuracy


def landscape_facts(findings: Findings) -> pd.DataFrame:
    """Summarise every plane on which the loss was measured."""
    table = findings.measurements.landscape
    rows = []
    for (model, plane), cells in table[table["loss"].notna()].groupby(["model", "plane"], sort=False):
        grid, checkpoint = cells[cells["place"] == "grid"], cells[cells["place"] == "checkpoint"].iloc[0]
        finite = grid["loss"][np.isfinite(grid["loss"])]
        row: dict[str, Any] = {"model": model, "plane": plane, "kind": checkpoint["kind"], "cells": len(grid)}
        row |= {"samples": checkpoint["samples"], "checkpoint_loss": checkpoint["loss"]}
        row |= {"checkpoint_accuracy": checkpoint["accuracy"]}
        row |= {"lowest_loss": finite.min(), "highest_loss": finite.max(), "not_finite": len(grid) - len(finite)}
        rows.append({**row, "working_distance": working_distance(cells)})
    columns = ["model", "plane", "kind", "cells", "samples", "checkpoint_loss", "checkpoint_accuracy"]
    columns += ["lowest_loss", "highest_loss", "not_finite", "working_distance"]
    return pd.DataFrame(rows, columns=columns)


def working_distance(cells: pd.DataFrame) -> float:
    """Return the distance up to which every evaluated cell has an accuracy of at least 95%."""
    distances = np.hypot(cells["x"].to_numpy(float), cells["y"].to_numpy(float))
    fails = distances[~(cells["accuracy"].to_numpy() >= WORKING)]
    reached = distances[distances < fails.min()] if fails.size else distances
    return float(reached.max()) if reached.size else float("nan")


_CELLS = ("loss", "accuracy")


def answer(findings: Findings) -> Answer:
    """Return every plane of every model, with its cells and its summary numbers."""
    table, facts = findings.measurements.landscape, findings(landscape_facts)
    results: dict[str, Summary] = {}
    shown: list[str | NumberTable] = []
    for model in findings.measurements.models["model"]:
        planes = []
        for number, cells in table[table["model"] == model].groupby("plane", sort=True):
            (summary,) = records(
                facts[(facts["model"] == model) & (facts["plane"] == number)].drop(columns="model")
            )
            planes.append({**summary, **_matrices(cells)})
        results[model] = json_ready({"unit": "nats", "planes": planes})
        shown += [f"{title(findings, model)}: landscape", NumberTable(_COLUMNS, results[model]["planes"])]
    return Answer(
        measured_glance(findings, table),
        details=landscape_sentences(findings),
        tables={"landscape": with_facts(findings, table), "landscape_planes": with_facts(findings, facts)},
        results=results,
        shown=shown,
    )


def _matrices(cells: pd.DataFrame) -> Summary:
    """Return coordinates and values of a plane's grid, and the values at its marks."""
    grid = cells[cells["place"] == "grid"].sort_values(["y", "x"], kind="stable")
    x, y = (np.unique(grid[name]) for name in ("x", "y"))
    marks = cells[cells["place"] != "grid"][["place", "x", "y", "distance", *_CELLS]]
    matrices = {name: grid[name].to_numpy(float).reshape(len(y), len(x)).tolist() for name in _CELLS}
    return {"x": x.tolist(), "y": y.tolist(), "marks": marks.to_dict("records"), **matrices}


def landscape_sentences(findings: Findings) -> list[str]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works."""
    labels, sentences = model_labels(findings.measurements.models), []
    for model, planes in findings(landscape_facts).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest, highest = planes["lowest_loss"].min(), planes["highest_loss"].max()
        kind = f"{len(planes)} random planes" if len(planes) > 1 else "one random plane"
        at, low, high = (number_words(v, "{:.2g}".format) for v in (first["checkpoint_loss"], lowest, highest))
        cells = low if math.isnan(lowest) else f"{low} to {high}"
        works = _working([float(distance) for distance in planes["working_distance"]])
        size = f"{counted(first['cells'], 'cell')}, {counted(first['samples'], 'sample')}"
        sentences.append(
            f"{labels[str(model)]}, {kind} ({size}): the loss is "
            f"{at} at the checkpoint and {cells} on the cells; {works}."
        )
    return sentences or ["The loss was evaluated on no plane."]


def _working(distances: Sequence[float]) -> str:
    """Return how far from the checkpoint the model still works, by plane."""
    if all(math.isnan(distance) for distance in distances):
        return "the checkpoint itself has less than 95% accuracy"
    distances = [distance for distance in distances if not math.isnan(distance)]
    if max(distances) == 0:
        return "no other cell near the checkpoint keeps 95% accuracy"
    return f"every cell up to {', '.join(f'{distance:.2g}' for distance in distances)} ‖θ‖ away keeps 95% accuracy"


_COLUMNS = (
    Column("plane kind", "plane", text), Column("cells"), Column("checkpoint_loss", "loss here"),
    Column("lowest_loss", "lowest"), Column("highest_loss", "highest"),
    Column("checkpoint_accuracy", "accuracy here"), Column("working_distance", "≥ 95% up to (‖θ‖)"),
)  # fmt: skip


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
    samples = counted(min(c.samples for c in cells), "sample")
    planes = len({c.plane for c in cells})
    how = f"{counted(planes, 'random plane')}, each tensor's direction as long as the tensor"
    seed = findings.measurements.provenance.get("seed")
    how += "" if seed is None else f" (seed {seed})"
    return (
        f"{how}; {grid}, each one model that was run on {samples}, deterministic: there is no sampling interval "
        "within a plane. ‖θ‖: length of all parameters of the checkpoint"
    )


_LEVELS = 8
_QUANTITIES = {"loss": ("cross-entropy (nats)", "viridis_r"), "accuracy": ("accuracy", "viridis")}


@drawing(
    "Coloured cells of cross-entropy and of accuracy on planes in parameter space through each checkpoint, "
    "contour lines over the loss, checkpoint marked: {shown}.",
    "Compare the size of the region around the cross in which the accuracy stays high. Every cell is a model that "
    "was run, and models of one figure share their colour scale.",
)
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
        bar.set_label(label, fontsize=9)
        bar.ax.tick_params(labelsize=9)
        title_with_facts(
            ax, f"{plane.title}, plane {plane.plane}" if name == "loss" else label, _facts(plane, name)
        )
    return finished(
        figure,
        f"{plane_facts(findings, cells)}. Cross: the checkpoint.\nColours are the evaluated cells themselves; "
        "contour lines of the first quantity, at the same values everywhere, are interpolated between them.",
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


@drawing(
    "Cross-entropy and accuracy against the distance from the checkpoint, along both axes of each plane, "
    "attention kinds together: {shown}.",
    "The rows of cells through the checkpoint, exactly as evaluated. Where the curves of one model differ much "
    "from direction to direction, one plane says little about that model.",
)
def landscape_cuts(findings: Findings) -> Figure:
    """Draw loss and accuracy along both axes of every plane, models of a task and seed on the same axes."""
    cells = plane_cells(findings, "loss")
    titles = list(dict.fromkeys(_panel(c) for c in cells))
    logarithmic = isinstance(common_scale(cells, "loss"), LogNorm)
    figure, axes = panel_grid(2 * len(titles), height=2.7, columns=2, sharey=False)
    for place, name in enumerate(titles):
        planes = [c for c in cells if _panel(c) == name]
        for ax, quantity in zip(axes[2 * place : 2 * place + 2], ("loss", "accuracy"), strict=True):
            _draw(ax, planes, quantity)
            title_with_facts(ax, f"{name}, {quantity}", [_count(planes)])
            ax.set_xlabel("distance from the checkpoint, in ‖θ‖")
            ax.xaxis.set_major_locator(MaxNLocator(6))
        axes[2 * place].set_ylabel("cross-entropy (nats)")
        axes[2 * place + 1].set_ylabel("accuracy")
        axes[2 * place + 1].set_ylim(-0.02, 1.02)
        if logarithmic:
            axes[2 * place].set_yscale("log")
    return finished(
        figure, f"{plane_facts(findings, cells)}. Points are evaluated cells; lines between them guide the eye."
    )


def _panel(cells: PlaneCells) -> str:
    return cells.title.removesuffix(f", {cells.series.label}")


def _count(planes: list[PlaneCells]) -> str:
    cuts = len([cut for c in planes for cut in _cuts(c)]) // len({c.series.model for c in planes})
    return f"{counted(cuts, 'cut')} per model, {counted(planes[0].samples, 'sample')}"


def _draw(ax: Axes, planes: list[PlaneCells], quantity: str) -> None:
    named: set[str] = set()
    for plane in planes:
        style = plane.series.style
        for distances, rows in _cuts(plane):
            values = rows[quantity].to_numpy(float)
            label = plane.series.label if plane.series.label not in named else "_again"
            named.add(plane.series.label)
            values = np.where(values > 0, values, np.nan) if quantity == "loss" else values
            ax.plot(
                distances, values, color=style.color, linestyle=style.line, linewidth=0.8 * style.width,
                marker=style.marker, markersize=2.5, label=label,
            )  # fmt: skip
    ax.axvline(0, color="#bbbbbb", linewidth=0.7, zorder=0)


def _cuts(plane: PlaneCells) -> Iterator[tuple[np.ndarray, pd.DataFrame]]:
    """Yield distances from the checkpoint and rows along both axes; exact, since every grid contains 0."""
    for axis, fixed in (("x", "y"), ("y", "x")):
        rows = plane.rows[plane.rows[fixed] == 0].sort_values(axis)
        yield rows[axis].to_numpy(float), rows


HEADINGS = (
    Heading(
        "landscape",
        "What does the loss look like around the checkpoint?",
        (landscape_contour, landscape_cuts),
        (
            "A plane shows two of more than a hundred thousand directions, and random ones miss the steep ones: a "
            "flat picture does not mean a flat loss.",
            "Distances are relative to the length ‖θ‖ of all parameters, and each tensor moves by its own length "
            "at distance 1. One trained model per surface says nothing of other seeds.",
        ),
    ),
)
