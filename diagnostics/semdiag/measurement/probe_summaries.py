"""The machine-readable findings of ``semdiag landscape`` and ``semdiag lipschitz``."""

from typing import Any

import numpy as np
import pandas as pd

from semdiag.measurement.landscape_facts import landscape_facts
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.strict_json import json_ready

Summary = dict[str, Any]
_FACTS = ("model", "sha256", "task", "attention", "k", "epoch")
_CELLS = ("loss", "accuracy", "dispersion_p50", "dispersion_p95", "separation_p50", "separation_p5", "load_max")


def landscape_summary(measurements: Measurements) -> Summary:
    """Every plane of every model, cell by cell, with what it says in numbers.

    Args:
        measurements: of one or more models, with the table landscape.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.landscape/1``; matrices have one list per y, null where a value
        is not finite; quantities that were not measured are absent.
    """
    facts = landscape_facts(measurements)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.landscape[measurements.landscape["model"] == row["model"]]
        planes = []
        for number, cells in own.groupby("plane", sort=True):
            said = facts[(facts["model"] == row["model"]) & (facts["plane"] == number)]
            plane = said.drop(columns="model").to_dict("records")[0] if len(said) else {"plane": number}
            planes.append({**plane, **_matrices(cells)})
        result = {key: row[key] for key in _FACTS} | {"unit": "nats", "planes": planes}
        results.append(result)
    return _ready("landscape", measurements, {"results": results})


def _matrices(cells: pd.DataFrame) -> Summary:
    """Coordinates and values of a plane's grid, and the values at its marks."""
    measured = [name for name in _CELLS if cells[name].notna().any()]
    grid = cells[cells["place"] == "grid"].sort_values(["y", "x"], kind="stable")
    x, y = (np.unique(grid[name]) for name in ("x", "y"))
    marks = cells[cells["place"] != "grid"][["place", "x", "y", "distance", *measured]]
    matrices = {name: grid[name].to_numpy(float).reshape(len(y), len(x)).tolist() for name in measured}
    return {"x": x.tolist(), "y": y.tolist(), "marks": marks.to_dict("records"), **matrices}


def _ready(command: str, measurements: Measurements, content: Summary) -> Summary:
    ready = {"schema": f"semdiag.{command}/1", "provenance": measurements.provenance, **content}
    return {key: json_ready(value) for key, value in ready.items()}
