"""Is every measured slope of the loss below its bound, and by how much?"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from semdiag.measuring.findings.finding import Finding, Verdict, log10, of_rows, verdicts_of
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs, differences
from semdiag.measuring.findings.strict_json import MODEL_FACTS, Summary, json_object
from semdiag.questions.bounds.answer.corollary import corollary_findings
from semdiag.questions.bounds.answer.rungs import network_rungs

SCOPE = (
    "Each constant is the largest over the evaluated inputs at this checkpoint. The paper's form is one value for "
    "all inputs together, from their largest norm, δ and load and their smallest Δ. A bound holds for these "
    "inputs and parameters only: it bounds the gradient there and is not a Lipschitz constant of a region. For "
    "heavy-hitter masks, sums over a token's queries are doubled, to cover the union of two masks. The local form "
    "bounds the gradient of the inputs' mean loss: it carries the residual of each input back token by token, "
    "with the weights, values and normalisations that it has. The bound at the point, of queries and keys, takes "
    "the gradients that the loss has in the mixed values. A constant more than 1,000 times above the measured "
    "slope is called vacuous."
)
NEAR, FAR = 1.0, 3.0  # powers of ten above the measured slope: a bound that could have failed, and a vacuous one
FORMS = ("point", "local", "sound", "paper")  # the nearest first
CLAIM = "the loss is no steeper in a tensor than its constant"


def parameter_findings(findings: Findings) -> list[Finding]:
    """Judge the constants of Theorem 2, tensor by tensor and all together."""
    measurements = findings.measurements
    results = []
    for name, rows in measurements.parameters.groupby("model", sort=False):
        model, constants = str(name), measurements.constants
        network = constants[(constants["model"] == model) & (constants["quantity"] == "network")].set_index("form")
        reason = network["assumptions"].to_dict().get("sound", "")
        tensors = [_tensor(model, row, reason) for row in rows.to_dict("records")]
        sound = _together(model, tensors, "sound", reason)
        sound = replace(sound, numbers={**sound.numbers, **_without_guarantee(network)})
        point, paper, local = (_of_form(model, rows, network, form) for form in ("point", "paper", "local"))
        results += [*point, sound, *paper, *local, *tensors]
    return results


def _of_form(model: str, rows: pd.DataFrame, network: pd.DataFrame, form: str) -> list[Finding]:
    """Judge the bounds of a form, over all tensors that have one; nothing without any, except for the paper's."""
    reason, holds = network["assumptions"].to_dict().get(form, ""), network["holds"].to_dict().get(form, True)
    known = rows[rows[f"ln_{form}"].notna()]
    known = known.assign(ln_sound=known[f"ln_{form}"], holds=holds)
    known = known if form == "paper" else known.assign(ln_secant=math.nan)
    tensors = [_tensor(model, row, reason) for row in known.to_dict("records")]
    return [_together(model, tensors, form, reason)] if tensors or form == "paper" else []


def _without_guarantee(network: pd.DataFrame) -> dict[str, float]:
    """Return how many sound constants are infinite, and the largest finite one; nothing if all are finite."""
    infinite, finite = (network[name].to_dict().get("sound", 0) for name in ("infinite", "ln_finite"))
    return {"inputs without a guarantee": infinite, "ln λ_L of the others": finite} if infinite else {}


def _tensor(model: str, row: Mapping[Hashable, Any], reason: str) -> Finding:
    bound, gradient, secant = (float(row[name]) for name in ("ln_sound", "ln_gradient", "ln_secant"))
    measured = max((slope for slope in (gradient, secant) if not math.isnan(slope)), default=math.nan)
    numbers = {"ln measured": measured, "ln bound": bound}
    if math.isnan(bound) or bound == math.inf or not row["holds"]:
        verdict, note = Verdict.NOT_MET, reason
    elif math.isnan(measured):
        verdict, note = Verdict.NOTHING, "no slope was measured: the labels of the inputs are unknown"
    elif gradient > bound + 1e-9:
        verdict, note = Verdict.VIOLATED, ""
    elif secant > bound + 1e-9:
        verdict = Verdict.NOT_MET
        note = "a secant is steeper: it leaves the parameters for which the constants hold"
    else:
        verdict = Verdict.HOLDS
        note = "both are 0: it cancels in the softmax" if bound == measured == -math.inf else ""
    if math.isfinite(measured) and math.isfinite(bound):
        numbers["log10 gap"] = log10(bound - measured)
    return Finding(model, CLAIM, "sound", str(row["tensor"]), verdict, numbers, note)


def _together(model: str, tensors: list[Finding], form: str, reason: str) -> Finding:
    verdicts = [tensor.verdict for tensor in tensors]
    gaps = [tensor.numbers.get("log10 gap", math.nan) for tensor in tensors]
    vacuous = sum(v is Verdict.HOLDS and gap > FAR for v, gap in zip(verdicts, gaps, strict=True))
    counts = {
        "holds": verdicts.count(Verdict.HOLDS) - vacuous,
        "vacuous": vacuous,
        "violated": verdicts.count(Verdict.VIOLATED),
        "not_met": verdicts.count(Verdict.NOT_MET),
    }
    known = pd.Series(gaps, dtype=float).dropna()
    numbers: dict[str, float] = {**counts, "unmeasured": verdicts.count(Verdict.NOTHING)}
    if len(known):
        numbers["within a factor of ten"] = int((known <= NEAR).sum())
        numbers |= {"smallest log10 gap": float(known.min()), "largest log10 gap": float(known.max())}
    return Finding(model, CLAIM, form, "all", of_rows(**counts), numbers, reason)


def bounds_findings(findings: Findings) -> list[Finding]:
    """Return findings on the constants of every model, then on Corollary 1 for every pair."""
    pairs = findings(compared_pairs)
    return [
        *findings(parameter_findings),
        *(finding for pair in pairs for finding in findings(corollary_findings, pair)),
    ]


def bounds_summary(findings: Findings) -> Summary:
    """Return constants, bounds and slopes of every model, and Corollary 1 for every pair."""
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
        result["network"] = findings(network_rungs, row["model"])
        results.append(result | {"verdicts": verdicts_of(of_models, row["model"])})
    compared = [
        {
            "label": pair.label,
            "reference": pair.full,
            "other": pair.other,
            "differences": differences(measurements.models, pair),
            "verdicts": verdicts_of(findings(corollary_findings, pair), pair.label),
        }
        for pair in pairs
    ]
    return json_object("bounds", findings, scope=SCOPE, results=results, pairs=compared)
