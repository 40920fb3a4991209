"""The machine-readable findings of ``semdiag landscape`` and ``semdiag lipschitz``."""

from typing import Any

import numpy as np
import pandas as pd

from semdiag.findings.landscape import landscape_facts
from semdiag.findings.lipschitz import estimate_findings, ordering_findings
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.secant_percentiles import secant_percentiles, secant_ratios
from semdiag.findings.strict_json import json_ready
from semdiag.findings.theory_summaries import verdicts_of
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles

Summary = dict[str, Any]
SCOPE = (
    "Every estimate is a lower end. Bounds speak about these samples at the drawn parameters, the checkpoint "
    "included; an end point is that of the sampling law, not the supremum over the ball."
)
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


def lipschitz_summary(measurements: Measurements) -> Summary:
    """Secants by radius, gradients, end points and Jacobians beside their bounds, and who has the steeper loss.

    Args:
        measurements: of one or more models, with the tables of
            :func:`~semdiag.measurement.probes.loss.lipschitz.lipschitz`.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.lipschitz/1``; null where a number is undefined or infinite.
    """
    findings, curves = estimate_findings(measurements), secant_percentiles(measurements)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        gradients = own.loss_gradients.groupby("group", sort=False)
        groups = [
            {
                "group": group,
                "gradient": percentiles(rows["slope"]),
                "at_checkpoint": float(rows.loc[rows["draw"] == 0, "slope"].iloc[0]),
                "largest_secant": own.loss_secants.loc[own.loss_secants["group"] == group, "slope"].max(),
                "ln_sound": rows["ln_sound"].max(),
                "end_point": own.end_points[own.end_points["group"] == group]
                .drop(columns=["model", "group"])
                .to_dict("records")[0],
            }
            for group, rows in gradients
        ]
        result = {key: row[key] for key in _FACTS} | {"unit": "nats per unit of the parameters", "groups": groups}
        result["secants"] = _of(curves, row["model"])
        result["blocks"] = [
            {"layer": layer, "stretch": percentiles(rows["norm"]), "ln_sound": rows["ln_sound"].max()}
            for layer, rows in own.jacobians.groupby("layer", sort=True)
        ]
        results.append(result | {"verdicts": verdicts_of(findings, row["model"])})
    pairs = [
        {
            "label": pair.label,
            "reference": pair.full,
            "other": pair.other,
            "ratios": secant_ratios(measurements, pair).to_dict("records"),
            "verdicts": verdicts_of(ordering_findings(measurements, [pair]), pair.label),
        }
        for pair in compared_pairs(measurements)
    ]
    return _ready("lipschitz", measurements, {"scope": SCOPE, "results": results, "pairs": pairs})


def _of(table: pd.DataFrame, model: str) -> list[Summary]:
    rows = table[table["model"] == model].drop(columns="model").to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


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
