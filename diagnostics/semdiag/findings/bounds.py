"""Is every measured slope of the loss below its bound, and how far below?"""

import math
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd

from semdiag.findings.consequences import consequence_findings
from semdiag.findings.corollary import corollary_findings
from semdiag.findings.finding import Finding, Verdict, log10, of_rows, verdicts_of
from semdiag.findings.findings import Findings
from semdiag.findings.pairing import compared_pairs, differences
from semdiag.findings.strict_json import MODEL_FACTS, Summary, json_object

SCOPE = (
    "The largest over the evaluated inputs at this checkpoint: a bound speaks about these inputs and parameters, "
    "and about no others. Heavy-hitter masks: sums over a token's queries are doubled, for the union of two masks."
)
CLAIM = "the loss is no steeper in a tensor than its constant"


def parameter_findings(findings: Findings) -> list[Finding]:
    """Judge the constants of Theorem 2, tensor by tensor and all together.

    The gap is log10 of the bound over the largest measured slope; a large one is looseness, not failure.

    Source: docs/theory.md#network. Deviation: none.

    Args:
        findings: with the tables constants and parameters.

    Returns:
        One finding per model and form for all tensors together, then one per tensor (sound form).
    """
    measurements = findings.measurements
    found = []
    for model, rows in measurements.parameters.groupby("model", sort=False):
        own = measurements.constants[measurements.constants["model"] == model]
        reasons = own[(own["quantity"] == "network")].set_index("form")["assumptions"].to_dict()
        tensors = [_tensor(str(model), row, reasons.get("sound", "")) for row in rows.to_dict("records")]
        found.append(_together(str(model), tensors, "sound", reasons.get("sound", "")))
        with_paper = rows[rows["ln_paper"].notna()]
        paper = [
            _tensor(str(model), {**row, "ln_sound": row["ln_paper"]}, "") for row in with_paper.to_dict("records")
        ]
        found.append(_together(str(model), paper, "paper", reasons.get("paper", "")))
        found += tensors
    return found


def _tensor(model: str, row: Mapping[Hashable, Any], reason: str) -> Finding:
    bound, slopes = float(row["ln_sound"]), [float(row[n]) for n in ("ln_gradient", "ln_secant")]
    measured = max((s for s in slopes if not math.isnan(s)), default=math.nan)
    numbers = {"ln measured": measured, "ln bound": bound}
    if math.isnan(bound) or bound == math.inf or not row["holds"]:
        verdict, note = Verdict.NOT_MET, reason
    elif math.isnan(measured):
        verdict, note = Verdict.NOTHING, "no slope was measured: the labels of the inputs are unknown"
    else:
        verdict = Verdict.VIOLATED if measured > bound + 1e-9 else Verdict.HOLDS
        note = "both are 0: it cancels in the softmax" if bound == measured == -math.inf else ""
    if math.isfinite(measured) and math.isfinite(bound):
        numbers["log10 gap"] = log10(bound - measured)
    return Finding(model, CLAIM, "sound", str(row["tensor"]), verdict, numbers, note)


def _together(model: str, tensors: list[Finding], form: str, reason: str) -> Finding:
    words = [t.verdict for t in tensors]
    counts = {
        "holds": words.count(Verdict.HOLDS),
        "violated": words.count(Verdict.VIOLATED),
        "not_met": words.count(Verdict.NOT_MET),
    }
    gaps = pd.Series([t.numbers["log10 gap"] for t in tensors if "log10 gap" in t.numbers], dtype=float)
    numbers: dict[str, float] = {**counts, "unmeasured": words.count(Verdict.NOTHING)}
    if len(gaps):
        numbers |= {"smallest log10 gap": float(gaps.min()), "largest log10 gap": float(gaps.max())}
    return Finding(model, CLAIM, form, "all", of_rows(**counts, vacuous=0), numbers, reason)


def bounds_findings(findings: Findings) -> list[Finding]:
    """What became of the constants of every model, then of Corollary 1 and its consequences on every pair.

    Args:
        findings: with the tables constants and parameters.
    """
    pairs = findings(compared_pairs)
    return [
        *findings(parameter_findings),
        *corollary_findings(findings, pairs),
        *consequence_findings(findings, pairs),
    ]


def bounds_summary(findings: Findings) -> Summary:
    """Constants, bounds and slopes of every model, and what Corollary 1 says about every pair.

    Args:
        findings: of one or more models, with constants and parameters.

    Returns:
        A JSON-ready dictionary, schema ``semdiag.bounds/1``; null where a number is undefined or infinite.
    """
    measurements = findings.measurements
    pairs = findings(compared_pairs)
    of_models = findings(parameter_findings)
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.of(row["model"])
        tables = {
            name: getattr(own, name).drop(columns="model").to_dict("records")
            for name in ("constants", "parameters")
        }
        result = {key: row[key] for key in MODEL_FACTS} | {"unit": "natural logarithm", **tables}
        results.append(result | {"verdicts": verdicts_of(of_models, row["model"])})
    compared = [
        {
            "label": pair.label,
            "reference": pair.full,
            "other": pair.other,
            "differences": differences(measurements.models, pair),
            "verdicts": verdicts_of(
                corollary_findings(findings, [pair]) + consequence_findings(findings, [pair]), pair.label
            ),
        }
        for pair in pairs
    ]
    return json_object("bounds", findings, scope=SCOPE, results=results, pairs=compared)
