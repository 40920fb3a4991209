"""The tables of the section ``along``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.presentation.tables import a_column_each, with_run_facts


def along_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Every snapshot of every run, a column for each quantity and statistic."""
    return {"along": with_run_facts(findings, a_column_each(findings.measurements.along))}
