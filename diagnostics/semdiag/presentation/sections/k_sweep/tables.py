"""The tables of the section ``k-sweep``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.k_sweep import condition_table
from semdiag.presentation.tables import with_facts


def sweep_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """What every k would leave, and the paper's conditions.

    The model's own k is ``k``, that of the sweep ``swept_k``. Layers and heads are told apart where the sweep is
    the report's only section: every layer, head and k would outweigh a whole report.
    """
    sweep = findings.measurements.sweep
    sweep = sweep if alone else sweep[sweep["layer"] == -1]
    tables = {"k_sweep": sweep, "k_sweep_conditions": findings(condition_table)}
    return {name: with_facts(findings, table.rename(columns={"k": "swept_k"})) for name, table in tables.items()}
