"""Whether every estimate stays below its bound, and whether top-k has the smaller ones, in sentences."""

import math
from collections.abc import Sequence

from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import compared_pairs
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.drawing.powers import factors
from semdiag.questions.lipschitz.answer.summary import AT_POINT, estimate_findings, ordering_findings

_ENDS = (min, "smallest"), (max, "largest")
_SHOWN_AS_ZERO = 0.05  # decimal logarithms below this are 0.0 when written out


def lipschitz_sentences(findings: Findings) -> list[str]:
    """Say whether every estimate stays below its bound, and whether top-k has the smaller ones."""
    sentences = []
    for pair in findings(compared_pairs):
        judged = findings(ordering_findings, pair)
        sentences += [f"{pair.label}: {_ordering(judged)}"] if judged else []
    for model, label in model_labels(findings.measurements.models).items():
        judged = [f for f in findings(estimate_findings) if f.subject == model]
        sentences += [f"{label}: {_below_bounds(judged)}"] if judged else []
    return sentences or ["Nothing is known of the steepness of these models' loss."]


def _ordering(judged: Sequence[Finding]) -> str:
    """Return at how many radii the loss around the counterpart is less steep, percentile by percentile."""
    answers = {Verdict.HOLDS: "is there", Verdict.VIOLATED: "is reversed"}
    start = "the paper's ordering (secants smaller than around full attention)"
    words = {f.verdict for f in judged}
    verdict = answers.get(judged[0].verdict, "is mixed") if len(words) == 1 else "is mixed"
    parts = [
        f"{f.where} smaller at {f.numbers['lower']:.0f}, larger at {f.numbers['higher']:.0f} of "
        f"{f.numbers['radii']:.0f} radii ({_ratios(f)})"
        for f in judged
    ]
    many = int(judged[0].numbers["planes"])
    planes = judged[0].note or f"{many} random planes, by 95% intervals"
    if judged[0].note:
        low, high = (end(f.numbers[f"{name} ratio"] for f in judged) for end, name in _ENDS)
        return f"{start} cannot be told: {judged[0].note} (ratios {low:.2g} to {high:.2g}), one training run each."
    return f"{start} {verdict}: {'; '.join(parts)}; {planes}, one training run each."


def _ratios(finding: Finding) -> str:
    low, high = finding.numbers["smallest ratio"], finding.numbers["largest ratio"]
    return "no ratio is a number" if math.isnan(low) else f"ratio {low:.2g} to {high:.2g}"


def _below_bounds(judged: Sequence[Finding]) -> str:
    violated = [f for f in judged if f.verdict is Verdict.VIOLATED]
    if violated:
        faults = "; ".join(f"{f.claim}: {f.numbers['violated']:.0f} are not" for f in violated)
        return f"ERROR OF SEMDIAG, a sound bound is exceeded: {faults}. Please report it."
    near, judged = _at_point(judged), [f for f in judged if f.claim != AT_POINT]
    gaps = [f.numbers["smallest log10 gap"] for f in judged if "smallest log10 gap" in f.numbers]
    checked = sum(int(f.numbers["holds"]) for f in judged)
    unmet = sum(int(f.numbers["not_met"]) for f in judged)
    tail = f"; {unmet:,} have no bound" if unmet else ""
    return f"{near}all {checked:,} estimates stay below the sound bounds{_nearest(gaps)}{tail}."


def _at_point(judged: Sequence[Finding]) -> str:
    """Return how tight the bounds at the checkpoint are, which could have failed."""
    proven = [f for f in judged if f.claim == AT_POINT and "smallest log10 gap" in f.numbers]
    if not proven:
        return ""
    n = proven[0].numbers
    gaps = factors(n["smallest log10 gap"], n["largest log10 gap"])
    return f"at the checkpoint {n['holds']:.0f} slopes stay below bounds {gaps} times as large; "


def _nearest(gaps: Sequence[float]) -> str:
    """Return the gap of the estimate nearest to its bound, from decimal logarithms; at least 0 up to rounding."""
    if not gaps:
        return ""
    if min(gaps) < _SHOWN_AS_ZERO:
        return f", the nearest within {10 ** max(min(gaps), 0) - 1:.1%} of it"
    return f", the nearest by a factor of 10^{min(gaps):.1f}"
