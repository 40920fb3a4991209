"""The tables of the section ``lipschitz``."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.secant_percentiles import secant_percentiles, secant_ratios
from semdiag.presentation.tables import with_facts


def lipschitz_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Secants by radius, gradients, end points, Jacobians, and one model's secants over another's."""
    tables = {"lipschitz_secants": with_facts(findings, findings(secant_percentiles))}
    for name in ("loss_gradients", "end_points", "jacobians"):
        tables[name] = with_facts(findings, getattr(findings.measurements, name))
    ratios = [secant_ratios(findings, pair).assign(pair=pair.label) for pair in findings(compared_pairs)]
    return tables | ({"lipschitz_ratios": pd.concat(ratios, ignore_index=True)} if ratios else {})
