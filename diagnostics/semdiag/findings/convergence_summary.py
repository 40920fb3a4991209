"""The findings of ``semdiag convergence`` as plain values."""

from dataclasses import asdict
from typing import Any

import pandas as pd

from semdiag.findings.convergence import arrivals
from semdiag.findings.findings import Findings
from semdiag.findings.prediction import held_out_tasks, predictor_table
from semdiag.findings.speed_and_dispersion import run_correlation, run_statistics, speed_dispersion_table
from semdiag.findings.strict_json import Summary, json_object


def convergence_summary(findings: Findings) -> Summary:
    """Epochs to the target, speed-ups, their relation to dispersion, and what else was measured of the runs.

    Args:
        findings: with runs.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.convergence/1``: target, targets (of single tasks), runs,
        speed_ups, over_seeds, speed_up_and_dispersion, along, predictors, held_out_tasks, lengths; null where a
        number is unknown, undefined or unbounded.
    """
    measurements = findings.measurements
    found, table = findings(arrivals), findings(speed_dispersion_table)
    return json_object(
        "convergence",
        findings,
        target=measurements.provenance.get("target"),
        targets=measurements.provenance.get("targets", {}),
        runs=_records(found.drop(columns="setting")),
        speed_ups=_records(table),
        over_seeds=_records(findings(run_statistics)),
        speed_up_and_dispersion=asdict(findings(run_correlation)),
        along=_records(measurements.along),
        predictors=_records(findings(predictor_table)),
        held_out_tasks=_records(findings(held_out_tasks)),
        lengths=_records(measurements.lengths),
    )


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
