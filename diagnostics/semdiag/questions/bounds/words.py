"""Sentences on the constants of Theorem 2 and on Corollary 1."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd
from rich.console import Console

from semdiag.capturing.attention_call import FIXED_MASKS
from semdiag.measuring.findings.findings import Finding, Findings, Pair, Verdict, agreed, compared_pairs, records
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, number
from semdiag.presenting.drawing.panels import factors, model_labels, powers_of_ten
from semdiag.presenting.question import title
from semdiag.presenting.section import (
    NEVER,
    Answer,
    Column,
    Glance,
    NumberTable,
    finite,
    plain,
    print_verdicts,
    top_words,
    wide_console,
)
from semdiag.questions.bounds.answer import (
    CLAIMS,
    FORMS,
    HEURISTIC,
    JUDGED_PERCENTILES,
    LEFT_SIDES,
    NOT_COMPARABLE,
    bounds_findings,
    bounds_summary,
    corollary_findings,
    network_rungs,
    parameter_findings,
)

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
        parts += [f"in {met} of {counted(len(stated), 'case')} in the {form} form{more}"] if of_form else []
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


def _exponential(value: float) -> str:
    return number(math.exp(value))


_CONSTANTS = (
    Column("layer", form=plain), Column("head", form=plain), Column("gamma-measured", "Γ", _exponential),
    Column("upsilon-measured", "Υ", _exponential), Column("token_norm-measured", "Ξ", _exponential),
    Column("norm_lipschitz_attention-measured", "λ_LN1", _exponential, drop=1),
    Column("norm_lipschitz_mlp-measured", "λ_LN2", _exponential, drop=2), Column("attention_map-sound", "ln λ_A"),
    Column("attention_map-paper", "ln λ_A paper"), Column("bilinear_form-sound", "ln λ_M"),
    Column("bilinear_form-paper", "ln λ_M paper"), Column("block_input-sound", "ln λ_X"),
    Column("block_input-paper", "ln λ_X paper"),
)  # fmt: skip
_SLOPES = (
    Column("layer", form=lambda layer: plain(None if layer == ALL else layer)),
    Column("group", "tensors", plain),
    *(Column(f"ln_{name}") for name in ("gradient", "secant", *FORMS)),
)
_PAIR = (
    Column("better", "better guarantee in", plain), Column("form", form=plain, drop=NEVER),
    Column("condition", form=plain, drop=1),
    *(Column(f"sides.{at}", p, finite) for at, p in enumerate(("p75", "p90", "p95", "p100"))),
    Column("answer", "mask better?", plain, drop=NEVER),
)  # fmt: skip
_ANSWERS = {
    Verdict.HOLDS: "yes",
    Verdict.VIOLATED: "no",
    Verdict.NOT_MET: "not met",
    Verdict.NOTHING: "inconclusive",
}


def print_bounds(findings: Findings) -> None:
    """Print slopes and constants of every model, and the conditions of every pair."""
    console = wide_console()
    summary = findings(bounds_summary)
    of_models = [finding for finding in findings(parameter_findings) if finding.where == "all"]
    for result in summary["results"]:
        console.print(f"\n{title(result)}: slopes of the loss, by group")
        own = findings.measurements.of(result["model"])
        console.print(_slopes(own.parameters))
        for sentence in constants_sentences(f for f in of_models if f.subject == result["model"]):
            console.print(sentence, style="red" if "an error of semdiag" in sentence else None)
        for sentence in rungs_sentences(findings(network_rungs, result["model"])):
            console.print(sentence)
        console.print("Constants:")
        console.print(_constants(own.constants))
    for pair in findings(compared_pairs):
        console.print(f"\n{pair.label}: {pair.full} and {pair.other}")
        _print_pair(console, findings(corollary_findings, pair))
    console.print(summary["scope"])


def _print_pair(console: Console, conditions: list[Finding]) -> None:
    """Print the conditions of a pair in a table by percentile, and the other findings as sentences."""
    by_condition: dict[tuple[str, str], list[Finding]] = {}
    for finding in conditions:
        if finding.percentile is not None:
            by_condition.setdefault((finding.claim, finding.form), []).append(finding)
    rows = []
    for (claim, form), parts in by_condition.items():
        name, threshold = LEFT_SIDES[form]
        one_k = ", one k" if any("one k" in part.note for part in parts) else ""
        row = {"better": CLAIMS[claim], "form": form + one_k, "condition": f"{name} < {threshold:g}"}
        answer = _ANSWERS[agreed(part.verdict for part in parts)]
        rows.append({**row, "sides": [part.numbers[name] for part in parts], "answer": answer})
    if rows:
        console.print(NumberTable(_PAIR, rows))
    others = [
        f for f in conditions
        if f.percentile is None and (f.where != "all" or (f.claim, f.form) not in by_condition)
    ]  # fmt: skip
    print_verdicts(console, others)


def _slopes(parameters: pd.DataFrame) -> NumberTable:
    """Return the largest measured slope and constants of each group of tensors, as natural logarithms."""
    names = [column.name for column in _SLOPES[2:]]
    largest = parameters.groupby(["layer", "group"], sort=False)[names].max().reset_index()
    return NumberTable(_SLOPES, records(largest))


def _constants(constants: pd.DataFrame) -> NumberTable:
    """Return a row a head, which repeats the constants of its layer."""
    named = constants.assign(name=constants["quantity"] + "-" + constants["form"])
    by_head = named[named["head"] != ALL].pivot(index=["layer", "head"], columns="name", values="ln_value")
    by_layer = named[named["head"] == ALL].pivot(index="layer", columns="name", values="ln_value")
    table = by_head.join(by_layer, on="layer").reindex(columns=[column.name for column in _CONSTANTS[2:]])
    network = named[named["layer"] == ALL].set_index("name")
    forms = {form: network["ln_value"].get(f"network-{form}") for form in ("local", "sound", "paper")}
    caption = f"ln λ_L of the network: {', '.join(f'{number(value)} {form}' for form, value in forms.items())}"
    if infinite := network["infinite"].get("network-sound"):
        others = number(network["ln_finite"].get("network-sound"))
        caption += f"; {infinite} inputs have no sound one, {others} for the others"
    return NumberTable(_CONSTANTS, records(table.reset_index()), caption=caption)


def bounds_glance(findings: Findings) -> Glance:
    """Return in how many cases the paper's corollary gives a top-k mask the better guarantee."""
    models = findings.measurements.models
    fixed_masks = set(models[models["attention"].isin(FIXED_MASKS)]["model"])
    labels = {pair.label for pair in findings(compared_pairs) if pair.other not in fixed_masks}
    cases = [
        f
        for f in findings(bounds_findings)
        if f.claim in CLAIMS and f.form == "paper" and f.percentile in JUDGED_PERCENTILES and f.subject in labels
    ]
    stated = [f for f in cases if f.verdict is not Verdict.NOT_MET]
    if not stated:
        return Glance(
            Answer.OPEN, "0 cases", "in which the corollary says anything about a top-k mask", claim=True
        )
    met = sum(f.verdict is Verdict.HOLDS for f in stated)
    return Glance(
        Answer.HOLDS if met == len(stated) else Answer.DOES_NOT, f"{met:,} of {counted(len(stated), 'case')}",
        f"in which the {top_words(findings)} mask has the better guarantee by Corollary 1 as printed (p75 to "
        "p95, W and X)",
        claim=True,
    )  # fmt: skip
