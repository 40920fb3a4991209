"""The tables of the section ``dispersion``."""

import pandas as pd

from semdiag.capturing.attention_kinds import external
from semdiag.findings.dispersion import layer_ratios
from semdiag.findings.findings import Findings
from semdiag.presentation.tables import percentile_table


def dispersion_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Percentiles of δ, and its ratio to full attention's where models can be compared."""
    tables = {"dispersion": percentile_table(findings, "dispersion")}
    if not external(findings.measurements.models).all():
        tables["dispersion_ratio"] = findings(layer_ratios)
    return tables
