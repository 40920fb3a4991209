"""How far apart kept and dropped scores are, and which keys are relied on."""

import pandas as pd

from semdiag.findings.findings import Findings
from semdiag.findings.layered_summary import by_layer, without
from semdiag.findings.strict_json import Summary
from semdiag.measurement.percentiles import percentiles


def separation_summary(findings: Findings) -> Summary:
    """Percentiles of Δ and of the raw key loads per layer and head, and pooled.

    Args:
        findings: of one or more models.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.separation/1``; null where a number is undefined.
    """

    def describe(rows: pd.DataFrame, loads: pd.DataFrame, suffix: str) -> Summary:
        load = without(percentiles(loads["load" + suffix]), "not_positive", "undefined")
        load["keys"] = load.pop("queries")
        return {"separation": percentiles(rows["separation" + suffix]), "load": load}

    return by_layer("separation", findings, describe)
