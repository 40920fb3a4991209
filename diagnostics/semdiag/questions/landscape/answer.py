"""Landscapes in numbers, sentences and figures: how far from the checkpoint a model still works."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from semdiag.measuring.findings.findings import Findings, Summary, json_ready, records
from semdiag.measuring.words import counted, number, text
from semdiag.presenting.answer import Answer, Claim, Shown, heading, measured_glance, title, with_facts
from semdiag.presenting.drawing.panels import NothingToDrawError, model_labels, panels_of
from semdiag.presenting.drawing.style import INK, drawing, finished, panel_grid, title_with_facts
from semdiag.presenting.tables import Column, NumberTable
from semdiag.questions.landscape.measure import LANDSCAPE

WORKING = 0.95  # accuracy


def landscape_facts(findings: Findings) -> pd.DataFrame:
    """Summarise every plane on which the loss was measured."""
    table = findings.measurements[LANDSCAPE]
    rows = []
    for (model, plane), cells in table[table["loss"].notna()].groupby(["model", "plane"], sort=False):
        grid = cells[cells["place"] == "grid"]
        checkpoint = cells[cells["place"] == "checkpoint"].iloc[0]
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
    table = findings.measurements[LANDSCAPE]
    facts = findings(landscape_facts)
    results: dict[str, Summary] = {}
    shown: list[Shown] = []
    for model in findings.measurements.models["model"]:
        planes = []
        for plane, cells in table[table["model"] == model].groupby("plane", sort=True):
            (summary,) = records(
                facts[(facts["model"] == model) & (facts["plane"] == plane)].drop(columns="model")
            )
            planes.append({**summary, **_matrices(cells)})
        results[model] = json_ready({"unit": "nats", "planes": planes})
        shown += [f"{title(findings, model)}: landscape", NumberTable(_COLUMNS, results[model]["planes"])]
    return Answer(
        measured_glance(findings, table),
        details=landscape_claims(findings),
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


def landscape_claims(findings: Findings) -> list[Claim]:
    """Say for every plane how the loss rises and how far from the checkpoint the model still works."""
    labels = model_labels(findings.measurements.models)
    claims = []
    for model, planes in findings(landscape_facts).groupby("model", sort=False):
        first = planes.iloc[0]
        lowest = planes["lowest_loss"].min()
        cells = _two_digits(lowest)
        if not math.isnan(lowest):
            cells += f" to {_two_digits(planes['highest_loss'].max())}"
        kind = f"{len(planes)} random planes" if len(planes) > 1 else "one random plane"
        size = f"{counted(first['cells'], 'cell')}, {counted(first['samples'], 'sample')}"
        sentence = (
            f"{labels[str(model)]}, {kind} ({size}): the loss is {_two_digits(first['checkpoint_loss'])} at the "
            f"checkpoint and {cells} on the cells; {_working([*map(float, planes['working_distance'])])}."
        )
        claims.append(Claim("planes", sentence, str(model), float(first["checkpoint_loss"]), "nats"))
    return claims or [Claim("planes", "The loss was evaluated on no plane.")]


_two_digits = partial(number, digits=2, unknown="undefined")


def _working(distances: Sequence[float]) -> str:
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
_LOGARITHMIC = 30.0  # largest over smallest value, from which on colours are logarithmic
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
    table = findings.measurements[LANDSCAPE]
    planes = [
        (f"{panel.title}, {series.label}, plane {number}", rows)
        for panel in panels_of(findings.measurements.models)
        for series in panel.series
        for number, rows in table[table["model"] == series.model].groupby("plane", sort=True)
        if np.isfinite(rows.loc[rows["place"] == "grid", "loss"]).any()
    ]
    if not planes:
        raise NothingToDrawError("The loss was not measured on any plane.")
    figure, axes = panel_grid(len(planes) * 2, height=3.2, columns=2, sharey=False)
    figure.set_layout_engine("constrained", h_pad=0.1)  # inches; square cells let two rows meet
    shown = pd.concat([rows[rows["place"] == "grid"] for _, rows in planes])
    for at, (name, (label, colors)) in enumerate(_QUANTITIES.items()):
        scale = _common_scale(shown[name].to_numpy(float))
        for ax, (plane, rows) in zip(axes[at::2], planes, strict=True):
            image = _draw_cells(ax, rows, name, scale, colors, plane if name == "loss" else label)
            bar = figure.colorbar(image, ax=ax, shrink=0.85, pad=0.02)
            bar.set_label(label, fontsize=9)
            bar.ax.tick_params(labelsize=9)
    side = round(len(planes[0][1]) ** 0.5)
    samples = counted(int(shown["samples"].min()), "sample")
    seed = findings.measurements.provenance.get("seed")
    seed_words = "" if seed is None else f" (seed {seed})"
    planes_words = counted(shown["plane"].nunique(), "random plane")
    return finished(
        figure,
        f"{planes_words}, each tensor's direction as long as the tensor{seed_words}; "
        f"{side} × {side} cells, each one model that was run on "
        f"{samples}, deterministic: there is no sampling interval within a plane. ‖θ‖: length of all parameters "
        "of the checkpoint. Cross: the checkpoint.\nColours are the evaluated cells themselves; contour lines of "
        "the loss, at the same values everywhere, are interpolated between them.",
    )


def _common_scale(values: np.ndarray) -> Normalize:
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    least = float(values[values > 0].min(initial=math.inf))
    if low >= 0 and high > _LOGARITHMIC * least:
        return LogNorm(least, high)
    return Normalize(low, high if high > low else low + 1.0)


def _draw_cells(ax: Axes, plane: pd.DataFrame, name: str, scale: Normalize, colors: str, words: str) -> Any:
    matrices = _matrices(plane)
    x, y, values = (np.array(matrices[each]) for each in ("x", "y", name))
    values = np.where(np.isfinite(values), values, np.nan)
    logarithmic = isinstance(scale, LogNorm)
    colours = np.where(values <= 0, scale.vmin or 0.0, values) if logarithmic else values
    colormap = matplotlib.colormaps[colors].with_extremes(bad="#cc4444")
    image = ax.pcolormesh(x, y, colours, norm=scale, cmap=colormap, shading="nearest", rasterized=True)
    ends = float(scale.vmin or 0.0), float(scale.vmax or 1.0)
    levels = (np.geomspace if logarithmic else np.linspace)(*ends, _LEVELS + 2)[1:-1]
    if name == "loss" and ((levels > np.nanmin(colours)) & (levels < np.nanmax(colours))).any():
        ax.contour(x, y, colours, levels=levels, colors=INK, linewidths=0.4, alpha=0.7)
    ax.plot(0, 0, marker="X", color="white", markeredgecolor=INK, markersize=7, linestyle="none", zorder=4)
    ax.grid(visible=False)
    ax.set_aspect("equal", adjustable="box")
    ax.set(xlabel="first direction, in ‖θ‖", ylabel="second direction, in ‖θ‖")
    checkpoint_value = plane.loc[plane["place"] == "checkpoint", name].iloc[0]
    title_with_facts(
        ax,
        words,
        [f"cells {np.nanmin(values):.3g} to {np.nanmax(values):.3g}", f"checkpoint {checkpoint_value:.3g}"],
    )
    return image


HEADINGS = heading(
    "landscape", "What does the loss look like around the checkpoint?", (landscape_contour,),
    "A plane shows two of more than a hundred thousand directions, and random ones miss the steep ones: a flat "
    "picture does not mean a flat loss.",
    "Distances are relative to the length ‖θ‖ of all parameters, and each tensor moves by its own length at "
    "distance 1. One trained model per surface says nothing of other seeds.",
)  # fmt: skip
