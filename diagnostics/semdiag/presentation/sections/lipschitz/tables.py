"""The tables of a report's sections in which parameters are moved."""

from collections.abc import Sequence

import pandas as pd

from semdiag.findings.landscape import landscape_facts
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.secant_percentiles import secant_percentiles, secant_ratios
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
    if "lipschitz" in sections:
        tables["lipschitz_secants"] = facts.merge(secant_percentiles(measurements), on="model")
        for name in ("loss_gradients", "end_points", "jacobians"):
            tables[name] = facts.merge(getattr(measurements, name), on="model")
        ratios = [
            secant_ratios(measurements, pair).assign(pair=pair.label) for pair in compared_pairs(measurements)
        ]
        if ratios:
            tables["lipschitz_ratios"] = pd.concat(ratios, ignore_index=True)
    if "landscape" in sections:
        cells = measurements.landscape.dropna(axis=1, how="all")
        tables["landscape"] = facts.merge(cells, on="model")
        tables["landscape_planes"] = facts.merge(landscape_facts(measurements), on="model")
    return tables
