"""What the theory's claims became, in sentences; the verdicts come from the measurement layer."""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from semdiag.findings.corollary import CLAIM, HEURISTIC
from semdiag.findings.finding import Finding, Verdict
from semdiag.findings.pairing import compared_pairs
from semdiag.findings.resampling import ratio_interval
from semdiag.measurement.measurements import Measurements
from semdiag.measurement.percentiles import percentiles
from semdiag.presentation.drawing.noise import percent
from semdiag.presentation.drawing.panels import panels_of

_RESAMPLES = 300
_PAPERS = {"W": "eq. 304", "X": "eq. 305"}
_GUARANTEE = {"W": "in the parameters (W)", "X": "in the inputs (X)"}


def in_short(findings: Mapping[str, Sequence[Finding]]) -> list[str]:
    """The theory's verdicts on all models together, for the first screen.

    Args:
        findings: of the sections stability and bounds, as far as they were measured.

    Returns:
        At most one sentence per section.
    """
    said = []
    pairs = [f for f in findings.get("stability", ()) if "ξ ‖z" in f.claim and f.numbers]
    if pairs:
        exceeded = {
            form: int(sum(f.numbers["violated"] for f in pairs if f.form == form)) for form in ("sound", "paper")
        }
        said.append(
            f"Softmax stability, all measured pairs of rows: the sound ξ is exceeded by {exceeded['sound']:,}, "
            f"the paper's by {exceeded['paper']:,}."
        )
    cases = [
        f for f in findings.get("bounds", ()) if f.claim in map(CLAIM.format, "WX") and f.where.startswith("p")
    ]
    parts = []
    for form in ("paper", "sound"):
        own = [f for f in cases if f.form == form and f.verdict is not Verdict.NOT_MET]
        met = sum(f.verdict is Verdict.HOLDS for f in own)
        parts += [f"in {met} of {len(own)} cases in the {form} form"] if own else []
    if parts:
        said.append(
            f"Corollary 1, over pairs, percentiles and both conditions: the mask has the better guarantee "
            f"{', '.join(parts)}; which ones, and whether those masks learn faster, stands under the bounds."
        )
    return said


def stability_sentences(measurements: Measurements, findings: Sequence[Finding]) -> list[str]:
    """Say whether ξ bounds what was measured, form by form, and whose attention moves more.

    Args:
        measurements: with secants.
        findings: of :func:`~semdiag.findings.stability.stability_findings`.

    Returns:
        Sentences per model, then one per pair and noise level.
    """
    said = []
    for model, label in _labels(measurements).items():
        own = [f for f in findings if f.subject == model]
        parts = [part for f in own for part in (_softmax(f),) if part]
        if parts:
            said.append(f"{label}: {' '.join(parts)}")
    said += _responses(measurements)
    return said or ["Nothing was perturbed: nothing is known of the stability of these models' attention."]


def _labels(measurements: Measurements) -> dict[str, str]:
    """Each model in words, like ``even-pairs, top-k (k = 5)``."""
    return {s.model: f"{panel.title}, {s.label}" for panel in panels_of(measurements.models) for s in panel.series}


def _softmax(finding: Finding) -> str:
    """What became of one form of ξ on one model's pairs of rows."""
    n = finding.numbers
    if finding.form == "":
        return f"{finding.note[:1].upper()}{finding.note[1:]}."
    if finding.claim.startswith("local") and finding.verdict is not Verdict.VIOLATED:
        return ""
    names = {"sound": "the sound ξ", "paper": "the paper's ξ", "sound, row form": "the sound row constant"}
    name = "the local constant's bound ξ*" if finding.claim.startswith("local") else names[finding.form]
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
        return f"{name[0].upper()}{name[1:]} speaks about no measured pair of rows: {finding.note}."
    tail = f"; for {int(n['vacuous']):,} it is no less than the trivial ½" if n["vacuous"] else ""
    if n.get("below the sound form"):
        tail += f"; for {int(n['below the sound form']):,} it lies below the sound form and promises too much"
    start = f"{name[0].upper()}{name[1:]} is not exceeded on {rows:,} measured pairs of rows"
    return f"{start} ({highest}{unmet}){tail}."


def _responses(measurements: Measurements) -> list[str]:
    """Whose attention weights move more under the same noise, pair by pair."""
    rows = dict(iter(measurements.secants.groupby(["model", "level"], sort=False)))
    said = []
    for pair in compared_pairs(measurements):
        for level in sorted(measurements.secants["level"].unique()):
            if (pair.full, level) not in rows or (pair.other, level) not in rows:
                continue
            other, full = rows[pair.other, level], rows[pair.full, level]
            means = [percentiles(part["weight_change"])["mean"] for part in (other, full)]
            ratio = ratio_interval(other, full, "weight_change", resamples=_RESAMPLES)
            more = "more" if means[0] > means[1] else "less"
            said.append(
                f"{pair.label}: {percent(level)} input noise moves this model's attention {more} than its "
                f"counterpart's (mean ‖p − p′‖₁ {means[0]:.2g} against {means[1]:.2g}; ratio of the medians "
                f"{ratio.estimate:.2g}, 95 % interval {ratio.low:.2g} to {ratio.high:.2g})."
            )
    return said


def bounds_sentences(measurements: Measurements, findings: Sequence[Finding]) -> list[str]:
    """Say whether the constants hold, and where a mask has the better guarantee.

    Args:
        measurements: of one or several models.
        findings: of the models (:func:`~semdiag.findings.bounds.parameter_findings`) and pairs.

    Returns:
        Sentences per model, then per pair.
    """
    said = []
    for model, label in _labels(measurements).items():
        parts = [_constants(f) for f in findings if f.subject == model and f.where == "all"]
        said += [f"{label}: {' '.join(parts)}"] if parts else []
    for pair in compared_pairs(measurements):
        parts = list(_corollary([f for f in findings if f.subject == pair.label]))
        said += [f"{pair.label}: {' '.join(parts)} ({HEURISTIC[0].upper()}{HEURISTIC[1:]}.)"] if parts else []
        said += [
            f"{pair.label}, {f.form} constants of the whole network: {f.note}."
            for f in findings
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


def _corollary(findings: Sequence[Finding]) -> Iterator[str]:
    for form in ("paper", "sound"):
        for parameter in ("W", "X"):
            own = [f for f in findings if f.claim == CLAIM.format(parameter) and f.form == form]
            parts = [f for f in own if f.where.startswith("p")]
            if parts:
                yield _condition(form, parameter, parts)
            elif own:
                yield f"Nothing conclusive {_GUARANTEE[parameter]}, {form} form: {own[0].note}."
    for f in findings:
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
