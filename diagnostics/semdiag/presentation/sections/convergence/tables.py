"""The tables of a report's sections on training runs."""

from collections.abc import Sequence

import pandas as pd

from semdiag.findings.convergence import arrivals, over_seeds
from semdiag.findings.prediction import held_out_tasks, predictor_table
from semdiag.findings.speed_and_dispersion import speed_dispersion_table
from semdiag.measurement.measurements import Measurements


def convergence_tables(measurements: Measurements, sections: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables to be written as CSV files.

    Args:
        measurements: with runs.
        sections: of the report.

    Returns:
        By file name without suffix: runs, history (of their epochs), speed_ups, over_seeds; along and lengths if
        measured; of predictors the correlations (predictors), the numbers behind them (candidates) and
        held_out_tasks.
    """
    tables = {}
    facts = measurements.runs[["model", "task", "attention", "seed"]]
    if "convergence" in sections:
        tables["runs"], tables["speed_ups"] = arrivals(measurements), speed_dispersion_table(measurements)
        tables["over_seeds"] = over_seeds(tables["runs"], tables["speed_ups"])
        tables["history"] = facts.merge(measurements.history, on="model")
    for name in ("along", "lengths"):
        if name in sections:
            tables[name] = facts.merge(_wide(getattr(measurements, name)), on="model")
    if "predictors" in sections:
        tables["predictors"] = predictor_table(measurements)
        tables["candidates"] = facts.merge(measurements.predictors, on="model")
        tables["held_out_tasks"] = held_out_tasks(measurements)
    return tables


def _wide(table: pd.DataFrame) -> pd.DataFrame:
    """A column for every quantity and statistic, like ``dispersion_p50``, instead of a row."""
    names = table["quantity"] + "_" + table["statistic"]
    places = [column for column in table if column not in ("quantity", "statistic", "value")]
    wide = table.assign(name=pd.Categorical(names, names.unique())).pivot(
        index=places, columns="name", values="value"
    )
    return wide.rename_axis(columns=None).reset_index()
