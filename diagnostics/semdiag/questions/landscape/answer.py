"""Landscapes in numbers and sentences: how far from the checkpoint a model still works."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from semdiag.measuring.findings.findings import Findings, Summary, json_ready, records
from semdiag.measuring.words import counted, number_words, text
from semdiag.presenting.answer import Answer, measured_glance, title, with_facts
from semdiag.presenting.drawing.panels import model_labels
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
