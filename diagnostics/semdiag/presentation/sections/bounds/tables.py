"""The tables of the section ``bounds``."""

from collections.abc import Sequence

import pandas as pd

from semdiag.findings.bounds import bounds_findings
from semdiag.findings.corollary import CLAIM
from semdiag.findings.finding import Finding
from semdiag.findings.findings import Findings
from semdiag.presentation.tables import verdict_table, with_facts

_PAIRED = {
    "full_dispersion": "δ_s",
    "dispersion": "δ",
    "separation": "Δ",
    "load": "load",
}
COROLLARY_COLUMNS = ["pair", "parameter", "form", "percentile", "value", "threshold", "verdict", *_PAIRED, "note"]


def bounds_tables(findings: Findings, alone: bool) -> dict[str, pd.DataFrame]:
    """Constants and tensors of every model, conditions of every pair, verdicts."""
    judged, measurements = findings(bounds_findings), findings.measurements
    return {
        "constants": with_facts(findings, measurements.constants),
        "parameters": with_facts(findings, measurements.parameters),
        "corollary": corollary_table(judged),
        "bounds_verdicts": verdict_table(judged),
    }


def corollary_table(judged: Sequence[Finding]) -> pd.DataFrame:
    """Both conditions of Corollary 1 for every pair, form and percentile, as measured.

    Args:
        judged: of :func:`~semdiag.findings.corollary.corollary_findings`, among others.

    Returns:
        One row per pair, parameter (W or X), form and percentile: value (left side, or difference of natural
        logarithms), threshold (1 or 0), verdict, and the percentiles of the pair it rests on.
    """
    claims = {CLAIM.format(name): name for name in ("W", "X")}
    rows = []
    for finding in judged:
        if finding.claim not in claims or not finding.where.startswith("p"):
            continue
        name, threshold = ("left side", 1.0) if "left side" in finding.numbers else ("ln margin", 0.0)
        row = {
            "pair": finding.subject,
            "parameter": claims[finding.claim],
            "form": finding.form,
            "percentile": int(finding.where[1:]),
            "value": float(finding.numbers[name]),
            "threshold": threshold,
            "verdict": finding.verdict.value,
        }
        row |= {column: float(finding.numbers[key]) for column, key in _PAIRED.items()}
        rows.append({**row, "note": finding.note})
    numbers = dict.fromkeys(["value", "threshold", *_PAIRED], "float64")
    return pd.DataFrame(rows, columns=COROLLARY_COLUMNS).astype(numbers)
