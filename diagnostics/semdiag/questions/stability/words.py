"""Whether ξ bounds the measured changes, and whose attention moves more, in sentences."""

import math
from collections.abc import Mapping
from typing import Any

from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words, number_words
from semdiag.presenting.drawing.noise import percent
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.stability.answer import LOCAL, OF_PAIR, UNKNOWN, response_table, stability_findings
from semdiag.questions.stability.glance import exceeding_pairs


def stability_in_short(findings: Findings) -> list[str]:
    """Return how often each form of ξ was exceeded, all models together."""
    exceeded = findings(exceeding_pairs)
    parts = []
    names = {OF_PAIR: "the sound ξ of the pair", "sound": "the sound ξ", "paper": "the paper's ξ"}
    for form, name in names.items():
        counts = exceeded.get(form)
        if counts is None:
            continue
        fixed = ", all of fixed masks" if counts["violated"] and counts["violated"] == counts["fixed"] else ""
        loose = f" (too loose to test for {counts['vacuous']:,})" if counts["vacuous"] else ""
        parts.append(f"{counts['violated']:,} of {counts['rows']:,} exceed {name}{fixed}{loose}")
    return [f"Softmax stability, measured pairs of rows: {'; '.join(parts)}."] if parts else []


def stability_sentences(findings: Findings) -> list[str]:
    """Return whether ξ bounds the measured changes, form by form, and whose attention moves more."""
    sentences = []
    for model, label in model_labels(findings.measurements.models).items():
        judged = [f for f in findings(stability_findings) if f.subject == model]
        parts = [part for f in judged for part in (_softmax(f),) if part]
        if parts:
            sentences.append(f"{label}: {' '.join(parts)}")
    samples = findings.measurements.secants.groupby("model")["sample"].nunique().min()
    sentences += [_response(row, int(samples)) for row in findings(response_table).to_dict("records")]
    return sentences or ["Nothing was perturbed: nothing is known of the stability of these models' attention."]


def _softmax(finding: Finding) -> str:
    """Return a sentence on one form of ξ on one model's pairs of rows."""
    n = finding.numbers
    if finding.claim == UNKNOWN:
        return f"{finding.note[:1].upper()}{finding.note[1:]}."
    if finding.claim == LOCAL and finding.verdict is not Verdict.VIOLATED:
        return ""
    names = {"sound": "the sound ξ", "paper": "the paper's ξ", "sound, row form": "the sound row constant"}
    names[OF_PAIR] = "the sound ξ of the pair"
    name = "the local constant's bound ξ*" if finding.claim == LOCAL else names[finding.form]
    rows = int(n["holds"] + n["violated"] + n["vacuous"])
    unmet = f", {int(n['not_met']):,} more do not meet its assumptions" if n["not_met"] else ""
    highest = f"largest measured/bound {n['largest measured over bound']:.4g}"
    if finding.verdict is Verdict.VIOLATED:
        fault = (
            "which contradicts the paper (read as an ℓ1 constant)"
            if finding.form == "paper"
            else "which is an error of semdiag"
        )
        start = f"{name} is exceeded by {int(n['violated']):,} of {rows:,} measured pairs of rows"
        return f"{start[0].upper()}{start[1:]} ({highest}{unmet}), {fault}."
    if not rows:
        return f"{name[0].upper()}{name[1:]} applies to no measured pair of rows: {finding.note}."
    tail = f"; for {int(n['vacuous']):,} it is no less than the trivial ½" if n["vacuous"] else ""
    if n.get("below the sound form"):
        tail += f"; for {int(n['below the sound form']):,} it lies below the sound form and promises too much"
    start = f"{name[0].upper()}{name[1:]} is not exceeded on {rows:,} measured pairs of rows"
    return f"{start} ({highest}{unmet}){tail}."


def _response(row: Mapping[Any, Any], samples: int) -> str:
    """Return whose attention weights move more under the same noise, if the ratio's interval decides."""
    start = f"{row['pair']}: {percent(row['level'])} input noise"
    if row["mean"] == row["full_mean"] == 0:
        return f"{start} moves neither this model's attention nor its counterpart's (mean ‖p − p′‖₁ 0 for both)."
    means = f"mean ‖p − p′‖₁ {number_words(row['mean'], _short)} against {number_words(row['full_mean'], _short)}"
    if math.isfinite(row["ratio"]):
        interval = interval_words(row["low"], row["high"], _short, samples)
        means += f"; ratio of the medians {row['ratio']:.2g}, {interval}"
    more = "more" if min(row["low"], row["ratio"]) > 1 else "less" if max(row["high"], row["ratio"]) < 1 else ""
    if more:
        return f"{start} moves this model's attention {more} than its counterpart's ({means})."
    return f"{start} does not tell whether this model's attention moves more than its counterpart's ({means})."


_short = "{:.2g}".format
