"""The tables of the section ``convergence``."""

import pandas as pd

from semdiag.findings.convergence import arrivals
from semdiag.findings.findings import Findings
from semdiag.findings.speed_and_dispersion import run_statistics, speed_dispersion_table
from semdiag.presentation.tables import with_run_facts


def convergence_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Runs, history (of their epochs), speed_ups, over_seeds."""
    return {
        "runs": findings(arrivals),
        "speed_ups": findings(speed_dispersion_table),
        "over_seeds": findings(run_statistics),
        "history": with_run_facts(findings, findings.measurements.history),
    }
