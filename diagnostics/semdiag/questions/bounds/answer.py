"""Constants of Theorem 2 and Corollary 1: verdicts, sentences, tables, and the conditions as cells."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from semdiag.capturing.attention_call import FIXED_MASKS
from semdiag.measuring.findings.estimates import in_part
from semdiag.measuring.findings.findings import (
    Finding,
    Findings,
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
from semdiag.measuring.words import UNKNOWN, counted, number, plain
from semdiag.presenting.answer import (
    MOST_LINES,
    Answer,
    Claim,
    Glance,
    Outcome,
    Shown,
    heading,
    numbered_claims,
    title,
    top_words,
    verdict_line,
    verdict_table,
    with_facts,
)
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.bounds.corollary import (
    CLAIMS,
    JUDGED_PERCENTILES,
    LEFT_SIDES,
    corollary_findings,
    corollary_table,
)
from semdiag.questions.bounds.measure import CONSTANTS, PARAMETERS

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
NEAR = 1.0
FAR = 3.0  # powers of ten above the measured slope: a bound that could have failed, and a vacuous one
FORMS = ("point", "local", "sound", "paper")  # the nearest first
BOUND_CLAIM = "the loss is no steeper in a tensor than its constant"


def parameter_findings(findings: Findings) -> list[Finding]:
    """Judge the constants of Theorem 2, tensor by tensor and all together."""
    measurements = findings.measurements
    results = []
    for name, rows in measurements[PARAMETERS].groupby("model", sort=False):
        model = str(name)
        constants = measurements[CONSTANTS]
        network = constants[(constants["model"] == model) & (constants["quantity"] == "network")].set_index("form")
        reason = network["assumptions"].to_dict().get("sound", "")
        tensors = [_tensor(model, row, reason) for row in rows.to_dict("records")]
        sound = _together(model, tensors, "sound", reason)
        infinite, finite = (network[name].to_dict().get("sound", 0) for name in ("infinite", "ln_finite"))
        without = {"inputs without a guarantee": infinite, "ln λ_L of the others": finite} if infinite else {}
        sound = replace(sound, numbers={**sound.numbers, **without})
        point, paper, local = (_of_form(model, rows, network, form) for form in ("point", "paper", "local"))
        results += [*point, sound, *paper, *local, *tensors]
    return results


def _of_form(model: str, rows: pd.DataFrame, network: pd.DataFrame, form: str) -> list[Finding]:
    """Judge the bounds of a form, over all tensors that have one; nothing without any, except for the paper's."""
    reason = network["assumptions"].to_dict().get(form, "")
    holds = network["holds"].to_dict().get(form, True)
    stated = rows[rows[f"ln_{form}"].notna()]
    stated = stated.assign(ln_sound=stated[f"ln_{form}"], holds=holds)
    stated = stated if form == "paper" else stated.assign(ln_secant=math.nan)
    tensors = [_tensor(model, row, reason) for row in stated.to_dict("records")]
    return [_together(model, tensors, form, reason)] if tensors or form == "paper" else []


def _tensor(model: str, row: Mapping[Hashable, Any], reason: str) -> Finding:
    bound, gradient, secant = (float(row[name]) for name in ("ln_sound", "ln_gradient", "ln_secant"))
    measured = max((slope for slope in (gradient, secant) if not math.isnan(slope)), default=math.nan)
    numbers = {"ln measured": measured, "ln bound": bound}
    if math.isnan(bound) or bound == math.inf or not row["holds"]:
        verdict = Verdict.NOT_MET
        note = reason
    elif math.isnan(measured):
        verdict = Verdict.NOTHING
        note = "no slope was measured: the labels of the inputs are unknown"
    elif gradient > bound + 1e-9:
        verdict = Verdict.VIOLATED
        note = ""
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
    finite_gaps = pd.Series(gaps, dtype=float).dropna()
    numbers: dict[str, float] = {**counts, "unmeasured": verdicts.count(Verdict.NOTHING)}
    if len(finite_gaps):
        numbers["within a factor of ten"] = int((finite_gaps <= NEAR).sum())
        numbers |= {"smallest log10 gap": float(finite_gaps.min()), "largest log10 gap": float(finite_gaps.max())}
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
    measurements = findings.measurements
    results = {}
    pairs = []
    shown: list[Shown] = []
    for model in measurements.models["model"]:
        measured = measurements.of(model)
        tables = {table.name: records(measured[table].drop(columns="model")) for table in _TABLES}
        verdicts = verdicts_of(findings(parameter_findings), model)
        results[model] = {"unit": "natural logarithm", **tables, "verdicts": verdicts}
        shown += _shown(findings, model)
    for pair in findings(compared_pairs):
        judged = findings(corollary_findings, pair)
        names = {"label": pair.label, "reference": pair.full, "other": pair.counterpart}
        different = {"differences": differences(measurements.models, pair)}
        pairs.append(names | different | {"verdicts": verdicts_of(judged, pair.label)})
        shown += [f"\n{pair.label}: {pair.full} and {pair.counterpart}", *_shown_pair(judged)]
    headline = corollary_claims(findings)
    return Answer(
        bounds_glance(findings),
        headline,
        bounds_claims(findings),
        findings(bounds_findings),
        tables={
            **{table.name: with_facts(findings, measurements[table]) for table in _TABLES},
            "corollary": corollary_table(findings, findings(compared_pairs)),
            "bounds_verdicts": verdict_table(findings(bounds_findings)),
        },
        results=results,
        more={"scope": SCOPE, "pairs": pairs},
        shown=[*shown, SCOPE],
        most_lines=MOST_LINES,
        opening=headline,  # the tables have the other sentences
    )


_TABLES = (CONSTANTS, PARAMETERS)


def _cases(findings: Findings, fixed: bool, form: str) -> tuple[int, int, int]:
    """Return in how many cases top-k masks, or fixed ones, have the better guarantee; of how many; unmet."""
    models = findings.measurements.models
    kinds = dict(zip(models["model"], models["attention"], strict=True))
    labels = {p.label for p in findings(compared_pairs) if (kinds[p.counterpart] in FIXED_MASKS) == fixed}
    verdicts = [
        f.verdict
        for f in findings(bounds_findings)
        if f.claim in CLAIMS and f.form == form and f.percentile in JUDGED_PERCENTILES and f.subject in labels
    ]
    unmet = verdicts.count(Verdict.NOT_MET)
    return verdicts.count(Verdict.HOLDS), len(verdicts) - unmet, unmet


def corollary_claims(findings: Findings) -> list[Claim]:
    """Return in how many cases top-k masks have the better guarantee; then the same for fixed masks."""
    claims = []
    if cases := _case_words(findings, fixed=False):
        sentence = f"Corollary 1: the top-k mask has the better guarantee {cases}"
        sentence += " (percentiles 75 to 95, both conditions)."
        claims.append(Claim("corollary", sentence, verdict=bounds_glance(findings).answer))
    if cases := _case_words(findings, fixed=True):
        control = f"The same for fixed masks, a control about which the corollary claims nothing: {cases}."
        claims.append(Claim("control", control))
    return claims


def _case_words(findings: Findings, fixed: bool) -> str:
    """Return in how many cases masks have the better guarantee, by form; empty if no case is stated."""
    parts = []
    for form in ("paper", "sound"):
        met, stated, unmet = _cases(findings, fixed, form)
        words = f"in {met} of {counted(stated, 'case')} in the {form} form"
        if unmet:
            words += f" (assumption not met in {unmet} more)"
        if stated + unmet:
            parts.append(words)
    return ", ".join(parts)


def bounds_claims(findings: Findings) -> list[Claim]:
    """Return whether the constants of each model hold, and why pairs cannot be compared."""
    claims = []
    for model, label in model_labels(findings.measurements.models).items():
        if lines := _model_lines(findings, model):
            claims.append(Claim("constants", f"{label}: {' '.join(lines)}", model))
    for pair in findings(compared_pairs):
        judged = [finding for finding in findings(corollary_findings, pair) if finding.where == "all"]
        parts = [f"{CLAIMS[f.claim]}, {f.form} form: {_ANSWERS[f.verdict]}" for f in judged if f.claim in CLAIMS]
        if parts:
            sentence = f"{pair.label}, a better guarantee of the mask: {'; '.join(parts)}."
            claims.append(Claim("guarantee", sentence, pair.label))
        unknown = [f"{pair.label}: {verdict_line(f)}." for f in judged if f.verdict is Verdict.NOTHING]
        claims += numbered_claims("unknown", unknown, pair.label)
    return claims or [Claim("constants", "No constant of these models is known.")]


def _model_lines(findings: Findings, model: str) -> list[str]:
    judged = [f for f in findings(parameter_findings) if f.subject == model and f.where == "all"]
    judged.sort(key=lambda f: FORMS.index(f.form))
    return [f"{verdict_line(f)}." for f in judged]


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
    *(
        Column(f"sides.{at}", p, partial(number, infinite=UNKNOWN))
        for at, p in enumerate(("p75", "p90", "p95", "p100"))
    ),
    Column("answer", "mask better?", plain, drop=NEVER),
)  # fmt: skip
_ANSWERS = {
    Verdict.HOLDS: "yes", Verdict.VIOLATED: "no", Verdict.NOT_MET: "not met", Verdict.NOTHING: "inconclusive",
}  # fmt: skip


def _shown(findings: Findings, model: str) -> Iterator[str | NumberTable]:
    measured = findings.measurements.of(model)
    yield f"{title(findings, model)}: slopes of the loss, by group"
    names = [column.name for column in _SLOPES[2:]]
    largest = measured[PARAMETERS].groupby(["layer", "group"], sort=False)[names].max().reset_index()
    yield NumberTable(_SLOPES, records(largest))
    yield from _model_lines(findings, model)
    yield "Constants:"
    yield _constants(measured[CONSTANTS])


def _shown_pair(conditions: list[Finding]) -> Iterator[str | NumberTable]:
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
    further_findings = [
        f for f in conditions
        if f.percentile is None and (f.where != "all" or (f.claim, f.form) not in by_condition)
    ]  # fmt: skip
    yield from map(verdict_line, further_findings)


def _constants(constants: pd.DataFrame) -> NumberTable:
    named = constants.assign(name=constants["quantity"] + "-" + constants["form"])
    by_head = named[named["head"] != ALL].pivot(index=["layer", "head"], columns="name", values="ln_value")
    by_layer = named[named["head"] == ALL].pivot(index="layer", columns="name", values="ln_value")
    table = by_head.join(by_layer, on="layer").reindex(columns=[column.name for column in _CONSTANTS[2:]])
    network = named[named["layer"] == ALL].set_index("name")
    forms = {form: network["ln_value"].get(f"network-{form}") for form in ("local", "sound", "paper")}
    caption = f"ln λ_L of the network: {', '.join(f'{number(value)} {form}' for form, value in forms.items())}"
    if infinite := network["infinite"].get("network-sound"):
        finite_bound = number(network["ln_finite"].get("network-sound"))
        caption += f"; {infinite} inputs have no sound one, {finite_bound} for the others"
    return NumberTable(_CONSTANTS, records(table.reset_index()), caption=caption)


def bounds_glance(findings: Findings) -> Glance:
    """Return in how many cases the paper's corollary gives a top-k mask the better guarantee."""
    met, stated, _ = _cases(findings, False, "paper")
    if not stated:
        words = "in which the corollary says anything about a top-k mask"
        return Glance(Outcome.OPEN, "0 cases", words, of_paper=True)
    words = (
        f"in which the {top_words(findings)} mask has the better guarantee by Corollary 1 as printed (p75 to "
        "p95, W and X)"
    )
    outcome = Outcome.HOLDS if met == stated else Outcome.DOES_NOT
    return Glance(outcome, f"{met:,} of {counted(stated, 'case')}", words, of_paper=True)


_HEURISTIC = (
    "Percentiles of δ, Δ and load are combined although they come from different queries, as the paper does: "
    "that is a heuristic, not a theorem about any one query."
)
HEADINGS = heading(
    "constants", "How far below their bounds are the slopes of the loss?", (),
    "A constant is the largest over the evaluated inputs at this checkpoint: it bounds the gradient there and is "
    "not a Lipschitz constant of a region. Gradient and secant are lower bounds of the true constant.",
    "The paper's form is one value for all evaluated inputs, for its own equations (post-norm, no biases). Where "
    "a model differs, the verdict says so: there the paper's theorem claims nothing.",
) + heading(
    "corollary", "Does the mask have the better guarantee?", (),
    _HEURISTIC,
    "The sound comparison in W never favours a heavy-hitter mask: the worst-case constant of full attention does "
    "not depend on its δ. Faster learning of a top-k model cannot follow from it.",
    "Fixed masks (banded, local blocks, random) are a control: their constants differ from those of full "
    "attention only in δ, k and load, and ignore what the tokens mean. The paper's numbers are those it prints, k "
    "= 5.",
)  # fmt: skip
