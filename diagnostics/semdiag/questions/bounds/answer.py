"""Constants of Theorem 2 and Corollary 1: verdicts, sentences, tables."""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_call import FIXED_MASKS
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import (
    Finding,
    Findings,
    Pair,
    Verdict,
    agreed,
    compared_pairs,
    differences,
    log10,
    of_rows,
    records,
    verdicts_of,
)
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, finite, number, plain
from semdiag.presenting.answer import (
    Answer,
    Glance,
    Outcome,
    title,
    top_words,
    verdict_line,
    verdict_table,
    with_facts,
)
from semdiag.presenting.drawing.panels import factors, model_labels, powers_of_ten
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.bounds.corollary import (
    CLAIMS,
    HEURISTIC,
    JUDGED_PERCENTILES,
    LEFT_SIDES,
    NOT_COMPARABLE,
    corollary_findings,
    corollary_table,
)

_NAMES = {("network", "local"): "local", ("network", "sound"): "sound", ("network_any_residual", "local"): "any"}


def network_rungs(findings: Findings, model: str) -> dict[str, float]:
    """Return the gaps between the whole gradient and its bounds, with their causes, in nats."""
    measurements = findings.measurements
    rows = measurements.constants[measurements.constants["model"] == model].to_dict("records")
    logs = {_NAMES[place]: _value(row) for row in rows if (place := (row["quantity"], row["form"])) in _NAMES}
    slopes = measurements.parameters.loc[measurements.parameters["model"] == model, "ln_gradient"].to_numpy(float)
    if len(logs) < len(_NAMES) or np.isnan(slopes).any():
        return {}
    gradient = float(np.logaddexp.reduce(2 * slopes, initial=-math.inf)) / 2
    if not all(map(math.isfinite, (gradient, *logs.values()))):
        return {}
    return {
        "gradient": gradient,
        "local": logs["local"],
        "sound": logs["sound"],
        "residual": logs["any"] - logs["local"],
        "point": logs["sound"] - logs["any"],
        "left": logs["local"] - gradient,
    }


def _value(row: dict[Hashable, Any]) -> float:
    return float(row["ln_finite"] if row["infinite"] else row["ln_value"])


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
BOUND_CLAIM = "the loss is no steeper in a tensor than its constant"


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
    return Finding(model, BOUND_CLAIM, "sound", str(row["tensor"]), verdict, numbers, note)


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
    return Finding(model, BOUND_CLAIM, form, "all", of_rows(**counts), numbers, reason)


def bounds_findings(findings: Findings) -> list[Finding]:
    """Return findings on the constants of every model, then on Corollary 1 for every pair."""
    pairs = findings(compared_pairs)
    return [
        *findings(parameter_findings),
        *(finding for pair in pairs for finding in findings(corollary_findings, pair)),
    ]


def answer(findings: Findings) -> Answer | None:
    """Return constants, bounds and slopes of every model, and Corollary 1 of pairs; None of drawn queries."""
    if in_part(findings):
        return None
    measurements, results, pairs = findings.measurements, {}, []
    shown: list[str | NumberTable] = []
    for model in measurements.models["model"]:
        measured = measurements.of(model)
        tables = {name: records(getattr(measured, name).drop(columns="model")) for name in _TABLES}
        verdicts = verdicts_of(findings(parameter_findings), model)
        rungs = findings(network_rungs, model)
        results[model] = {"unit": "natural logarithm", **tables, "network": rungs, "verdicts": verdicts}
        shown += _shown(findings, model)
    for pair in findings(compared_pairs):
        judged = findings(corollary_findings, pair)
        names = {"label": pair.label, "reference": pair.full, "other": pair.other}
        different = {"differences": differences(measurements.models, pair)}
        pairs.append(names | different | {"verdicts": verdicts_of(judged, pair.label)})
        shown += [f"\n{pair.label}: {pair.full} and {pair.other}", *_shown_pair(judged)]
    headline = corollary_in_short(findings)
    return Answer(
        bounds_glance(findings),
        headline,
        bounds_sentences(findings),
        findings(bounds_findings),
        tables=bounds_tables(findings),
        results=results,
        more={"scope": SCOPE, "pairs": pairs},
        shown=[*shown, SCOPE],
        opening=headline,  # the tables have the other sentences
    )


_TABLES = ("constants", "parameters")
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


def _shown(findings: Findings, model: str) -> Iterator[str | NumberTable]:
    """Yield slopes and constants of one model."""
    measured = findings.measurements.of(model)
    yield f"{title(findings, model)}: slopes of the loss, by group"
    yield _slopes(measured.parameters)
    judged = [f for f in findings(parameter_findings) if f.where == "all" and f.subject == model]
    yield from constants_sentences(judged)
    yield from rungs_sentences(findings(network_rungs, model))
    yield "Constants:"
    yield _constants(measured.constants)


def _shown_pair(conditions: list[Finding]) -> Iterator[str | NumberTable]:
    """Yield the conditions of a pair in a table by percentile, and the other findings as sentences."""
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
        yield NumberTable(_PAIR, rows)
    others = [
        f for f in conditions
        if f.percentile is None and (f.where != "all" or (f.claim, f.form) not in by_condition)
    ]  # fmt: skip
    yield from map(verdict_line, others)


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
            Outcome.OPEN, "0 cases", "in which the corollary says anything about a top-k mask", claim=True
        )
    met = sum(f.verdict is Verdict.HOLDS for f in stated)
    return Glance(
        Outcome.HOLDS if met == len(stated) else Outcome.DOES_NOT, f"{met:,} of {counted(len(stated), 'case')}",
        f"in which the {top_words(findings)} mask has the better guarantee by Corollary 1 as printed (p75 to "
        "p95, W and X)",
        claim=True,
    )  # fmt: skip


def bounds_tables(findings: Findings) -> dict[str, pd.DataFrame]:
    """Return constants and tensors of every model, conditions of every pair, verdicts."""
    return {
        "constants": with_facts(findings, findings.measurements.constants),
        "parameters": with_facts(findings, findings.measurements.parameters),
        "corollary": corollary_table(findings, findings(compared_pairs)),
        "bounds_verdicts": verdict_table(findings(bounds_findings)),
    }
