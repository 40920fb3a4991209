"""Sentences on the constants of Theorem 2 and on Corollary 1."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd

from semdiag.capturing.attention_kinds import FIXED_MASKS
from semdiag.measuring.findings.finding import Finding, Verdict
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.pairing import Pair, compared_pairs
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.drawing.powers import factors, powers_of_ten
from semdiag.questions.bounds.answer.corollary import (
    CLAIMS,
    HEURISTIC,
    LEFT_SIDES,
    NOT_COMPARABLE,
    corollary_findings,
)
from semdiag.questions.bounds.answer.rungs import network_rungs
from semdiag.questions.bounds.answer.summary import FORMS, bounds_findings, parameter_findings

_PAPERS = {"W": "eq. 304", "X": "eq. 305"}
_GUARANTEE = {"W": "in the parameters (W)", "X": "in the inputs (X)"}


def corollary_in_short(findings: Findings) -> list[str]:
    """Return in how many cases top-k masks have the better guarantee; then the same for fixed masks."""
    cases = [f for f in findings(bounds_findings) if f.claim in CLAIMS and f.percentile not in (None, 100)]
    fixed = {pair.label for pair in findings(compared_pairs) if _is_fixed(findings, pair)}
    of_top_k, control = ([f for f in cases if (f.subject in fixed) == wanted] for wanted in (False, True))
    sentences = []
    if parts := _counts(of_top_k):
        sentences.append(
            f"Corollary 1: the top-k mask has the better guarantee {parts} (percentiles 75 to 95, both "
            "conditions)."
        )
    if parts := _counts(control):
        sentences.append(
            "The same for fixed masks, a control about which the corollary claims nothing: the mask's constants "
            f"are the smaller ones {parts}."
        )
    return sentences


def _counts(cases: Sequence[Finding]) -> str:
    """Return ``in 2 of 18 cases in the paper form (assumption not met in 6 more), …``."""
    parts = []
    for form in ("paper", "sound"):
        of_form = [f for f in cases if f.form == form]
        stated = [f for f in of_form if f.verdict is not Verdict.NOT_MET]
        met = sum(f.verdict is Verdict.HOLDS for f in stated)
        unmet = len(of_form) - len(stated)
        more = f" (assumption not met in {unmet} more)" if unmet else ""
        parts += [f"in {met} of {len(stated)} cases in the {form} form{more}"] if of_form else []
    return ", ".join(parts)


def _is_fixed(findings: Findings, pair: Pair) -> bool:
    """Return whether a pair's mask ignores the scores."""
    models = findings.measurements.models
    return bool(models.loc[models["model"] == pair.other, "attention"].isin(FIXED_MASKS).all())


def bounds_sentences(findings: Findings) -> list[str]:
    """Return whether the constants hold, and where a mask has the better guarantee."""
    sentences = []
    for model, label in model_labels(findings.measurements.models).items():
        of_model = [f for f in findings(parameter_findings) if f.subject == model and f.where == "all"]
        parts = [*constants_sentences(of_model), *rungs_sentences(findings(network_rungs, model))]
        sentences += [f"{label}: {' '.join(parts)}"] if parts else []
    for pair in findings(compared_pairs):
        parts = list(_corollary_sentences(findings(corollary_findings, pair), _is_fixed(findings, pair)))
        sentences += [f"{pair.label}: {' '.join(parts)} ({HEURISTIC[0].upper()}{HEURISTIC[1:]}.)"] if parts else []
    return sentences or ["No constant of these models is known."]


def rungs_sentences(rungs: Mapping[str, float]) -> list[str]:
    """Return sentences on the loss's gradient, its local bound, the worst case and the gaps; none if unknown."""
    if not rungs:
        return []
    gap = rungs["sound"] - rungs["gradient"]
    parts = {name: f"{rungs[name]:.1f} ({rungs[name] / gap:.0%})" for name in ("residual", "point", "left")}
    return [
        f"All parameters together, in ln: gradient {rungs['gradient']:.1f}, local bound {rungs['local']:.1f}, "
        f"worst case {rungs['sound']:.1f}. Of the {gap:.1f} nats between, the loss's residual explains "
        f"{parts['residual']}, what else the point knows {parts['point']}; {parts['left']} are left."
    ]


def constants_sentences(judged: Iterable[Finding]) -> list[str]:
    """Return sentences on one model's constants: those that could have failed, then the vacuous ones."""
    by_form = sorted(judged, key=lambda f: FORMS.index(f.form))
    vacuous = [f for f in by_form if f.verdict is Verdict.VACUOUS]
    sentences = [_constants_sentence(f) for f in by_form if f not in vacuous]
    if vacuous:
        parts = "; ".join(_vacuous_words(f) for f in vacuous)
        sentences.append(f"Vacuous, true and more than 1,000 times the measured slopes in most tensors: {parts}.")
    return sentences


def _vacuous_words(finding: Finding) -> str:
    """Return the gap of a vacuous form, and its unmet assumptions."""
    n, reason = finding.numbers, _unmet_words(finding)
    gaps = powers_of_ten(n["smallest log10 gap"], n["largest log10 gap"])
    tensors = int(n["holds"] + n["vacuous"])
    return (
        f"the {finding.form} constants of Theorem 2, {gaps} times what was measured in {tensors} tensors{reason}"
    )


def _unmet_words(finding: Finding) -> str:
    assumed = finding.note.replace("assumption not met: ", "")
    return f" (these assumptions do not hold here: {assumed})" if assumed else ""


def _constants_sentence(finding: Finding) -> str:
    """Return a sentence on one form of one model's constants."""
    n, name, reason = finding.numbers, f"the {finding.form} constants of Theorem 2", _unmet_words(finding)
    if finding.form in ("point", "local"):
        at_point = finding.form == "point"
        name = "the bounds of the gradient at this point" if at_point else "the local bounds of the gradient"
    if finding.verdict is Verdict.VIOLATED:
        fault = "which contradicts the paper" if finding.form == "paper" else "which is an error of semdiag"
        return f"In {n['violated']:.0f} tensors the loss is steeper than {name}, {fault}{reason}."
    if finding.verdict is Verdict.NOT_MET and reason:
        return f"Nothing can be said about {name}{reason}."
    if finding.verdict is not Verdict.HOLDS:
        return f"On {name}: {finding.verdict}{reason}."
    which = "of the queries and keys " if finding.form == "point" else ""
    sentence = f"In {n['holds'] + n['vacuous']:.0f} tensors {which}the loss is no steeper than {name}"
    if "smallest log10 gap" not in n:  # no slope to compare with: of weights that are no numbers
        return f"{sentence}{reason}."
    gaps = factors(n["smallest log10 gap"], n["largest log10 gap"])
    near = f", {n['within a factor of ten']:.0f} within a factor of ten" if n["within a factor of ten"] else ""
    slopes = "gradients" if finding.form in ("point", "local") else "slopes"  # secants leave the point
    return f"{sentence}, which are {gaps} times the measured {slopes}{near}{reason}."


def _corollary_sentences(judged: Sequence[Finding], fixed: bool) -> Iterator[str]:
    for form in ("paper", "sound"):
        for claim, parameter in CLAIMS.items():
            of_claim = [f for f in judged if f.claim == claim and f.form == form]
            at_percentiles = [f for f in of_claim if f.percentile is not None]
            if at_percentiles:
                yield _condition_sentence(form, parameter, at_percentiles, fixed)
            elif of_claim:
                yield f"Inconclusive {_GUARANTEE[parameter]}, {form} form: {of_claim[0].note}."
    for f in judged:
        if f.claim == NOT_COMPARABLE:
            yield f"Inconclusive: {f.note}."


def _side_words(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞" if value > 0 else "−∞"


def _condition_sentence(form: str, parameter: str, parts: Sequence[Finding], fixed: bool) -> str:
    """Return at which percentiles one condition gives the mask the better guarantee."""
    by_verdict: dict[Verdict, list[str]] = {}
    for f in parts:
        value = f.numbers[LEFT_SIDES[form][0]]
        shown = f.where if f.verdict is Verdict.NOT_MET or pd.isna(value) else f"{f.where} ({_side_words(value)})"
        by_verdict.setdefault(f.verdict, []).append(shown)
    words = {
        Verdict.HOLDS: "holds at",
        Verdict.VIOLATED: "does not hold at",
        Verdict.NOT_MET: "cannot be stated at",
    }
    cases = ", ".join(f"{words[v]} {', '.join(at)}" for v, at in by_verdict.items())
    equation = "Theorem 4" if fixed else _PAPERS[parameter]
    what = f"{equation}, left side below 1" if form == "paper" else "ln margin below 0"
    whose = "Control: a smaller constant of the fixed mask" if fixed else "A better guarantee of the mask"
    return f"{whose} {_GUARANTEE[parameter]}, {form} form ({what}), {cases}."
