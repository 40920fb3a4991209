"""The findings of ``semdiag convergence`` as plain values."""

from dataclasses import asdict
from typing import Any

import pandas as pd

from semdiag.findings.convergence import arrivals, over_seeds
from semdiag.findings.prediction import held_out_tasks, predictor_table
from semdiag.findings.speed_and_dispersion import speed_dispersion, speed_dispersion_table
from semdiag.findings.strict_json import json_ready
from semdiag.measurement.measurements import Measurements


def convergence_summary(measurements: Measurements) -> dict[str, Any]:
    """Epochs to the target, speed-ups, their relation to dispersion, and what else was measured of the runs.

    Args:
        measurements: with runs.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.convergence/1``: target, targets (of single tasks), runs,
        speed_ups, over_seeds, speed_up_and_dispersion, along, predictors, held_out_tasks, lengths; null where a
        number is unknown, undefined or unbounded.
    """
    found, table = arrivals(measurements), speed_dispersion_table(measurements)
    ready = {
        "schema": "semdiag.convergence/1",
        "provenance": measurements.provenance,
        "target": measurements.provenance.get("target"),
        "targets": measurements.provenance.get("targets", {}),
        "runs": _records(found.drop(columns="setting")),
        "speed_ups": _records(table),
        "over_seeds": _records(over_seeds(found, table)),
        "speed_up_and_dispersion": asdict(speed_dispersion(table)),
        "along": _records(measurements.along),
        "predictors": _records(predictor_table(measurements)),
        "held_out_tasks": _records(held_out_tasks(measurements)),
        "lengths": _records(measurements.lengths),
    }
    return {key: json_ready(value) for key, value in ready.items()}


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
