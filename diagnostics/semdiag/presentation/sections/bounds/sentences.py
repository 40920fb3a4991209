"""What became of the constants of Theorem 2 and of Corollary 1, in sentences."""

from collections.abc import Iterator, Sequence

import pandas as pd

from semdiag.findings.bounds import bounds_findings
from semdiag.findings.corollary import CLAIM, HEURISTIC
from semdiag.findings.finding import Finding, Verdict
from semdiag.findings.findings import Findings
from semdiag.findings.pairing import compared_pairs
from semdiag.presentation.drawing.panels import model_labels

_PAPERS = {"W": "eq. 304", "X": "eq. 305"}
_GUARANTEE = {"W": "in the parameters (W)", "X": "in the inputs (X)"}


def corollary_in_short(findings: Findings) -> list[str]:
    """In how many cases the mask has the better guarantee, all pairs together."""
    cases = [
        f for f in findings(bounds_findings) if f.claim in map(CLAIM.format, "WX") and f.where.startswith("p")
    ]
    parts = []
    for form in ("paper", "sound"):
        own = [f for f in cases if f.form == form and f.verdict is not Verdict.NOT_MET]
        met = sum(f.verdict is Verdict.HOLDS for f in own)
        parts += [f"in {met} of {len(own)} cases in the {form} form"] if own else []
    if not parts:
        return []
    return [
        f"Corollary 1, over pairs, percentiles and both conditions: the mask has the better guarantee "
        f"{', '.join(parts)}; which ones, and whether those masks learn faster, stands under the bounds."
    ]


def bounds_sentences(findings: Findings) -> list[str]:
    """Say whether the constants hold, and where a mask has the better guarantee.

    Args:
        findings: of one or several models.

    Returns:
        Sentences per model, then per pair.
    """
    said = []
    for model, label in model_labels(findings.measurements.models).items():
        parts = [_constants(f) for f in findings(bounds_findings) if f.subject == model and f.where == "all"]
        said += [f"{label}: {' '.join(parts)}"] if parts else []
    for pair in findings(compared_pairs):
        parts = list(_corollary([f for f in findings(bounds_findings) if f.subject == pair.label]))
        said += [f"{pair.label}: {' '.join(parts)} ({HEURISTIC[0].upper()}{HEURISTIC[1:]}.)"] if parts else []
        said += [
            f"{pair.label}, {f.form} constants of the whole network: {f.note}."
            for f in findings(bounds_findings)
            if f.subject == pair.label and "ln λ_L other over reference" in f.numbers
        ]
    return said or ["No constant of these models is known."]


def _constants(finding: Finding) -> str:
    """What became of the constants of Theorem 2 of one model."""
    n, name = finding.numbers, f"the {finding.form} constants of Theorem 2"
    unmet = finding.note.replace("assumption not met: ", "")
    reason = f"; its assumptions are not all met here ({unmet})" if unmet else ""
    if finding.verdict is Verdict.VIOLATED:
        fault = "which contradicts the paper" if finding.form == "paper" else "which is an error of semdiag"
        return f"In {n['violated']:.0f} tensors the loss is steeper than {name}, {fault}{reason}."
    if finding.verdict is not Verdict.HOLDS:
        return f"On {name}: {finding.verdict}{reason}."
    gaps = f"10^{n['smallest log10 gap']:.1f} to 10^{n['largest log10 gap']:.1f}"
    start = f"In {n['holds']:.0f} tensors the loss is no steeper than {name}"
    return f"{start}, which are {gaps} times the measured slopes{reason}."


def _corollary(judged: Sequence[Finding]) -> Iterator[str]:
    for form in ("paper", "sound"):
        for parameter in ("W", "X"):
            own = [f for f in judged if f.claim == CLAIM.format(parameter) and f.form == form]
            parts = [f for f in own if f.where.startswith("p")]
            if parts:
                yield _condition(form, parameter, parts)
            elif own:
                yield f"Nothing conclusive {_GUARANTEE[parameter]}, {form} form: {own[0].note}."
    for f in judged:
        if f.claim == CLAIM.format("W and X"):
            yield f"Nothing conclusive: {f.note}."


def _condition(form: str, parameter: str, parts: Sequence[Finding]) -> str:
    """At which percentiles one condition says that the mask has the better guarantee."""
    where: dict[Verdict, list[str]] = {}
    for f in parts:
        value = f.numbers.get("left side", f.numbers.get("ln margin", float("nan")))
        shown = f.where if f.verdict is Verdict.NOT_MET or pd.isna(value) else f"{f.where} ({value:.2f})"
        where.setdefault(f.verdict, []).append(shown)
    words = {
        Verdict.HOLDS: "holds at",
        Verdict.VIOLATED: "does not hold at",
        Verdict.NOT_MET: "cannot be stated at",
    }
    said = ", ".join(f"{words[v]} {', '.join(at)}" for v, at in where.items())
    what = f"{_PAPERS[parameter]}, left side below 1" if form == "paper" else "ln margin below 0"
    return f"A better guarantee of the mask {_GUARANTEE[parameter]}, {form} form ({what}), {said}."
