"""The tables of a report's sections in which parameters are moved."""

from collections.abc import Sequence

import pandas as pd

from semdiag.measurement.landscape_facts import landscape_facts
from semdiag.measurement.measurements import Measurements

_FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]


def probe_tables(measurements: Measurements, sections: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables to be written as CSV files.

    Args:
        measurements: of any number of models.
        sections: of the report.

    Returns:
        By file name without suffix.
    """
    facts, tables = measurements.models[_FACTS], {}
    if "landscape" in sections:
        cells = measurements.landscape.dropna(axis=1, how="all")
        tables["landscape"] = facts.merge(cells, on="model")
        tables["landscape_planes"] = facts.merge(landscape_facts(measurements), on="model")
    return tables
