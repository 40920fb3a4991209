"""The tables of a report's sections on masks under noise and on other k."""

from collections.abc import Sequence

import pandas as pd

from semdiag.findings.k_sweep import condition_table
from semdiag.findings.mask_stability import effect_table, mask_table
from semdiag.measurement.measurements import Measurements

_FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]


def mask_tables(measurements: Measurements, sections: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Tables to be written as CSV files.

    Args:
        measurements: of any number of models.
        sections: of the report.

    Returns:
        By file name without suffix; the model's own k is ``k``, that of a sweep ``swept_k``. A sweep's layers and
        heads are told apart where it is the report's only section.
    """
    facts, tables = measurements.models[_FACTS], {}
    if "mask-stability" in sections:
        tables["mask_stability"] = facts.merge(mask_table(measurements), on="model")
        if len(measurements.noise_effects):
            tables["noise_effects"] = facts.merge(effect_table(measurements), on="model")
    if "k-sweep" in sections:
        named, sweep = {"k": "swept_k"}, measurements.sweep
        if len(sections) > 1:  # every layer, head and k would outweigh a whole report: pooled rows only
            sweep = sweep[sweep["layer"] == -1]
        tables["k_sweep"] = facts.merge(sweep.rename(columns=named), on="model")
        tables["k_sweep_conditions"] = facts.merge(condition_table(measurements).rename(columns=named), on="model")
    return tables
