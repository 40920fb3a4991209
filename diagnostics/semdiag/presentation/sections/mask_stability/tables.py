"""The tables of the section ``mask-stability``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.mask_stability import effect_table, mask_table
from semdiag.presentation.tables import with_facts


def mask_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Masks by noise level, layer and head; what the noise does to the output, where it is known."""
    tables = {"mask_stability": with_facts(findings, findings(mask_table))}
    if len(findings.measurements.noise_effects):
        tables["noise_effects"] = with_facts(findings, findings(effect_table))
    return tables
