"""The tables of a report's stability and bounds sections, from measurements and findings."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from semdiag.findings.bounds import parameter_findings
from semdiag.findings.consequences import consequence_findings
from semdiag.findings.corollary import CLAIM, corollary_findings
from semdiag.findings.finding import Finding
from semdiag.findings.lipschitz import estimate_findings, ordering_findings
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.stability import stability_findings
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles
from semdiag.measurement.probes.noise.softmax_bounds import local_stability, with_bounds

_FACTS = ["model", "task", "attention", "k", "seed", "snapshot", "epoch"]
_PAIRED = {
    "full_dispersion": "δ_s",
    "dispersion": "δ",
    "separation": "Δ",
    "load": "load",
}
COROLLARY_COLUMNS = ["pair", "parameter", "form", "percentile", "value", "threshold", "verdict", *_PAIRED, "note"]


def theory_findings(measurements: Measurements, sections: Sequence[str]) -> dict[str, list[Finding]]:
    """Judge what the theory claims, for the sections of a report that speak about it.

    Args:
        measurements: of any number of models.
        sections: of the report.

    Returns:
        Findings by section: ``stability`` (per model), ``bounds`` and ``lipschitz`` (per model, then per pair).
    """
    found: dict[str, list[Finding]] = {}
    if "stability" in sections:
        found["stability"] = stability_findings(measurements)
    if "bounds" in sections:
        pairs = compared_pairs(measurements)
        found["bounds"] = parameter_findings(measurements)
        found["bounds"] += corollary_findings(measurements, pairs) + consequence_findings(measurements, pairs)
    if "lipschitz" in sections:
        found["lipschitz"] = estimate_findings(measurements)
        found["lipschitz"] += ordering_findings(measurements, compared_pairs(measurements))
    return found


def theory_tables(measurements: Measurements, findings: dict[str, list[Finding]]) -> dict[str, pd.DataFrame]:
    """Tables to be written as CSV files.

    Args:
        measurements: of any number of models.
        findings: from :func:`theory_findings`.

    Returns:
        By file name without suffix; natural logarithms in columns and quantities that start with ``ln``.
    """
    tables = {}
    if "stability" in findings:
        tables["stability"] = stability_table(measurements)
        tables["stability_verdicts"] = findings_table(findings["stability"])
    if "bounds" in findings:
        facts = measurements.models[_FACTS]
        tables["constants"] = facts.merge(measurements.constants, on="model")
        tables["parameters"] = facts.merge(measurements.parameters, on="model")
        tables["corollary"] = corollary_table(findings["bounds"])
        tables["bounds_verdicts"] = findings_table(findings["bounds"])
    return tables


def stability_table(measurements: Measurements) -> pd.DataFrame:
    """Percentiles of measured changes and of both forms of ξ, per layer and head, and pooled.

    Args:
        measurements: with the table secants.

    Returns:
        The model's facts, noise, layer, head (``all`` where pooled), quantity (local, secant, response,
        ln_sound, ln_paper, ln_row), then the columns of
        :func:`~semdiag.measurement.percentiles.percentiles`.
    """
    rows: list[dict[Any, Any]] = []
    for facts in measurements.models[_FACTS].to_dict("records"):
        own = measurements.of(facts["model"])
        local = own.queries.assign(local=local_stability(own.queries))
        rows += [{**facts, "noise": None, **row} for row in _by_place(local, {"local": "local"})]
        named = {"secant": "secant", "response": "weight_change"}
        named |= {name: name for name in ("ln_sound", "ln_paper", "ln_row")}
        for noise, secants in with_bounds(own.secants, str(facts["attention"])).groupby("level"):
            rows += [{**facts, "noise": noise, **row} for row in _by_place(secants, named)]
    return pd.DataFrame(rows)


def _by_place(rows: pd.DataFrame, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    places: list[tuple[Any, Any, pd.DataFrame]] = [
        (layer, head, part) for (layer, head), part in rows.groupby(["layer", "head"], sort=True)
    ]
    for layer, head, part in [*places, ("all", "all", rows)]:
        for quantity, column in columns.items():
            yield {"layer": layer, "head": head, "quantity": quantity, **percentiles(part[column])}


def corollary_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """Both conditions of Corollary 1 for every pair, form and percentile, as measured.

    Args:
        findings: of :func:`~semdiag.findings.corollary.corollary_findings`, among others.

    Returns:
        One row per pair, parameter (W or X), form and percentile: value (left side, or difference of natural
        logarithms), threshold (1 or 0), verdict, and the percentiles of the pair it rests on.
    """
    claims = {CLAIM.format(name): name for name in ("W", "X")}
    rows = []
    for finding in findings:
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


def findings_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """Findings as a table, their numbers in words.

    Args:
        findings: of any verdict.

    Returns:
        subject, claim, form, where, verdict, numbers (``name = value; …``), note.
    """
    columns = ["subject", "claim", "form", "where", "verdict", "numbers", "note"]
    rows = []
    for f in findings:
        numbers = "; ".join(f"{name} = {value:.12g}" for name, value in f.numbers.items())
        rows.append((f.subject, f.claim, f.form, f.where, f.verdict.value, numbers, f.note))
    return pd.DataFrame(rows, columns=columns)
