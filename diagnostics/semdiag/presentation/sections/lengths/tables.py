"""The tables of the section ``lengths``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.presentation.tables import a_column_each, with_run_facts


def length_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Every model on every length, a column for each quantity and statistic."""
    return {"lengths": with_run_facts(findings, a_column_each(findings.measurements.lengths))}
