"""The tables of the section ``separation``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.presentation.tables import percentile_table


def separation_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Percentiles of Δ and of the key loads."""
    return {name: percentile_table(findings, name) for name in ("separation", "load")}
