"""The tables of the section ``landscape``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.landscape import landscape_facts
from semdiag.presentation.tables import with_facts


def landscape_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Every evaluated cell, and what each plane says."""
    cells = findings.measurements.landscape.dropna(axis=1, how="all")
    return {
        "landscape": with_facts(findings, cells),
        "landscape_planes": with_facts(findings, findings(landscape_facts)),
    }
