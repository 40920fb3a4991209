"""Is sparse attention enough? The verdict in a sentence, and what stands behind it."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from semdiag.measuring.counted import counted
from semdiag.measuring.findings.estimates import drawn
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import percent
from semdiag.measuring.findings.strict_json import records
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.bounds.answer.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer.quarters import WHOLE, quarter_table, smallest_enough
from semdiag.questions.k_sweep.answer.rerun import budget_content, change_table, tolerance_of
from semdiag.questions.k_sweep.answer.sparse_verdict import (
    ESTIMATED,
    MASS,
    ROUNDING,
    SparseVerdict,
    amount,
    cost_words,
    keys_share,
    limit_words,
    next_token,
    samples_needed,
    sparse_glance,
    sparse_verdict,
)
from semdiag.questions.k_sweep.answer.summary import conditions_defined, conditions_met
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.measure.rerun import HARM, LEAST_SAMPLES, MOST_HARMED

_QUANTITIES = {  # what changes, and the end of a limit of its change
    "perplexity": ("perplexity", "of perplexity"),
    "loss": ("the loss", "of loss"),
    "divergence": ("the output distribution (KL divergence)", "of KL divergence"),
    "output_change": ("the outputs (of their norm)", "of the outputs' norm"),
}
_WHY = {
    "near_uniform": "the attention is near uniform, half of the queries weigh their keys almost evenly",
    "chance": "the model predicts no better than chance (untrained?)",
    "control": "as many random keys do as little harm: what is measured does not depend on the attention",
    "drops_nothing": "no query has more keys than any k that was run, so nothing was dropped",
    "few_samples": "k = {k} per query{share} {cost}; {samples} samples cannot exclude that {harmed_high} of "
    "the inputs change by more than {harm}; {needed} can",
    "harmed": "k = {k} per query{share} {cost} on average, but {harmed} of {samples} samples change by more than "
    "{harm}",
    "uncertain": "k = {k} per query{share} {cost}; {samples} samples cannot tell whether by more than {tolerance}"
    "{would}",
    "not_sparse": "no k that was run is at most half of the keys",
    "not_finite": "the change at k = {k} is not a finite number (outputs are NaN or infinite, their norm is 0, or "
    "a probability becomes 0)",
    "fixed_mask": "its mask does not rank keys by their scores",
    "own_mask": "it was trained to keep its k largest scores, and was not run with fewer",
    "other_kinds": "a verdict is about topk, which is not among the kinds that were run",
    "not_measured": "it was not measured",
}


def verdict_sentence(verdict: SparseVerdict, model: str) -> str:
    """Return the verdict in one sentence, the first one about any sweep.

    Args:
        verdict: the verdict.
        model: its path, for the command that would tell more.
    """
    if verdict.reason == "not_rerun":
        weight = (
            f"no k up to the largest measured keeps {MASS:.0%} of the weight"
            if verdict.k is None
            else f"k = {verdict.k}{keys_share(verdict)} keeps {percent(verdict.mass, 1)}% of the weight"
        )
        return (
            f"cannot tell before it is run with masks: {weight}; to measure what a mask costs: semdiag k-sweep "
            f"{model} --rerun."
        )
    if verdict.reason:
        reason = _WHY[verdict.reason].format(**_facts(verdict))
        return f"{reason}." if verdict.reason in ESTIMATED else f"cannot tell: {reason}."
    if verdict.answer == "plausible":
        weight = "" if math.isnan(verdict.mass) else f", keeps {percent(verdict.mass, 1)}% of the weight"
        return f"plausible: k = {verdict.k} per query{keys_share(verdict)} {cost_words(verdict)}{weight}."
    free = "not without loss" if verdict.measure == "loss" else "not without change"
    if verdict.costly is not None:
        return (
            f"{free}: k = {verdict.costly.k} per query{keys_share(verdict.costly)} {cost_words(verdict.costly)}; "
            f"within {limit_words(verdict, verdict.tolerance)} needs {verdict.k}{keys_share(verdict)}."
        )
    return f"{free}: even k = {verdict.k} per query{keys_share(verdict)} {cost_words(verdict)}."


def _facts(verdict: SparseVerdict) -> dict[str, object]:
    """Return what the reasons name, in words."""
    if not verdict.samples:
        return {"k": verdict.k}
    needed = samples_needed(verdict)
    return {
        "k": verdict.k,
        "share": keys_share(verdict),
        "cost": cost_words(verdict),
        "samples": f"{verdict.samples:,}",
        "harmed": round(verdict.harmed * verdict.samples),
        "harmed_high": f"{percent(verdict.harmed_high, 1)}%",
        "harm": named_limit(verdict, HARM * verdict.tolerance),
        "tolerance": limit_words(verdict, verdict.tolerance),
        "needed": f"{LEAST_SAMPLES:,}",
        "would": f"; about {needed:,} would" if needed else "",
    }


def k_sweep_in_short(findings: Findings) -> list[str]:
    """Return the verdict on one model, or how many of several models work with sparse attention.

    Args:
        findings: with a sweep.
    """
    models = list(findings.measurements.models["model"])
    if len(models) == 1:
        sentence = verdict_sentence(findings(sparse_verdict, models[0]), models[0])
        kinds = kinds_lines(findings, models[0])
        start = sentence[:1] if sentence.startswith("k =") else sentence[:1].upper()
        return [start + sentence[1:], *kinds]
    glance = findings(sparse_glance)
    return [f"Sparse attention, {glance.answer}: {glance.number} {glance.words}."]


def k_sweep_sentences(findings: Findings) -> list[str]:
    """Return each model's verdict, its grounds, and in how many cases the paper's conditions are met.

    Args:
        findings: with a sweep.
    """
    labels = model_labels(findings.measurements.models)
    return [f"{label}: {' '.join(verdict_lines(findings, model))}" for model, label in labels.items()]


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """Return the verdict's sentence, followed by its grounds.

    Args:
        findings: with a sweep.
        model: its path.
    """
    verdict = findings(sparse_verdict, model)
    lines = [verdict_sentence(verdict, model), *kinds_lines(findings, model), *place_lines(findings, model)]
    if verdict.samples:
        before = 0.0 if abs(verdict.before) < ROUNDING else verdict.before
        known = f"{before:.4g} nats" if math.isfinite(before) else "not a finite number"
        what = f" Without a mask the loss is {known}." if verdict.measure == "loss" else ""
        lines.append(
            f"Run with masks on {counted(verdict.samples, 'sample')}.{what} A k is enough if "
            f"the upper end of its interval, and of that of every larger k, is at most "
            f"{named_limit(verdict, verdict.tolerance)}, and at most {MOST_HARMED:.0%} of the inputs can change "
            f"by more than {named_limit(verdict, HARM * verdict.tolerance)}."
        )
    elif verdict.reason == "near_uniform":
        lines.append(f"Its loss may tell: semdiag k-sweep {model} --rerun.")
    if len(findings.measurements.budgets):
        lines += budget_lines(findings, model)
    if verdict.queries and math.isnan(verdict.mass):
        lines.append(
            f"The weight that {counted(verdict.k or 0, 'key')} keep was not measured: the sweep ends below."
        )
    elif verdict.queries and not math.isnan(verdict.share):
        lines.append(
            f"Weight kept is the mean over {verdict.queries:,} queries with more than "
            f"{counted(verdict.k or 0, 'key')}; {verdict.left_out:,} with no more keys are left out, "
            "as the mask drops nothing there."
        )
    facts = findings.measurements.models.set_index("model").loc[model]
    if facts["attention"] == "topk":
        run = verdict.samples or verdict.reason == "drops_nothing"
        these = "everything is computed over the keys that it keeps" if run else "these are its scores"
        lines.append(f"The model was trained with top-k attention, k = {facts['k']}: {these}.")
    if model in drawn(findings):
        lines.append(
            "Queries were drawn: the weight kept is estimated from them, and the paper's conditions, which need "
            "extremes and loads over every query, are not judged."
        )
    return lines + _conditions_lines(findings, model, verdict.k)


def _conditions_lines(findings: Findings, model: str, asked: int | None) -> list[str]:
    """In how many cases the paper's conditions are met by the k of the verdict, and by the best one."""
    met, what = conditions_met(findings, model), "The paper's conditions of Corollary 1"
    if not met:
        return []
    if not conditions_defined(findings, model):
        return [f"{what} have no value at any k: what they divide by, δ_s or Δ_h(k), is 0."]
    best, cases = max(met, key=lambda k: met[k]), f"{len(CLAIMS) * len(JUDGED_PERCENTILES)} cases"
    cases += " (W and X at p75, p90 and p95)"
    if not met[best]:
        words = f"by no measured k in any of {cases}"
    elif asked in met:
        words = f"by k = {asked} in {met[asked]} of {cases}; most often by k = {best}, in {met[best]}"
    else:
        words = f"most often by k = {best}, in {met[best]} of {cases}"
    return [f"{what} are met {words}."]


def kinds_lines(findings: Findings, model: str) -> list[str]:
    """Return the changes by other kinds of sparse attention at the verdict's k, least first; none if none was run.

    Args:
        findings: with a sweep.
        model: its path.
    """
    verdict, again = findings(sparse_verdict, model), findings(change_table)
    if not verdict.samples or verdict.k is None:
        return []
    again = again[(again["model"] == model) & (again["k"] == verdict.k) & again["mask"].isin(KINDS)]
    if not set(again["mask"]) - {TOP_K, RANDOM}:
        return []
    rows = sorted(records(again), key=lambda row: math.inf if math.isnan(row["change"]) else row["change"])
    each = [f"{row['mask']} {amount(verdict, row['change'], True)}" for row in rows]
    return [
        f"Change of {changed_words(verdict)} with {counted(verdict.k, 'key')} of each kind: {', '.join(each)}."
    ]


def changed_words(verdict: SparseVerdict) -> str:
    """Return what it is that changes: "perplexity", "the loss", "the outputs (of their norm)".

    Args:
        verdict: with a measure.
    """
    return _quantity(verdict)[0]


def named_limit(verdict: SparseVerdict, value: float) -> str:
    """Return a limit with what it is a change of: "0.01 nats of loss", "1% of perplexity".

    Args:
        verdict: with a measure.
        value: in nats, or relative.
    """
    return f"{limit_words(verdict, value)} {_quantity(verdict)[1]}"


def _quantity(verdict: SparseVerdict) -> tuple[str, str]:
    return _QUANTITIES["perplexity" if verdict.perplexity else verdict.measure]


def place_lines(findings: Findings, model: str) -> list[str]:
    """Return sentences on top-k's changes from the first to the last quarter of texts, and the k per length.

    Args:
        findings: with a sweep.
        model: its path.
    """
    verdict, table = findings(sparse_verdict, model), findings(quarter_table)
    own = table[(table["model"] == model) & (table["length"] == 0) & (table["quarter"] != WHOLE)]
    own = own[(own["mask"] == TOP_K) & (own["k"] == verdict.k)].sort_values("quarter")
    lines = []
    if len(own) and verdict.perplexity:
        each = ", ".join(amount(verdict, change, True) for change in own["change"])
        lines.append(
            f"Change of perplexity by top-k with {counted(verdict.k or 0, 'key')}, from the first to the last "
            f"quarter of the positions: {each}. Early positions have few keys to lose."
        )
    needed = findings(smallest_enough, model)
    if len(needed):
        verdict = _of_quarters(findings, model)
    for mask, rows in needed[needed["mask"] != RANDOM].groupby("mask", sort=False):
        each = ", ".join(f"{needed_words(row)} at {row['length']} tokens" for row in records(rows))
        lines.append(
            f"Smallest k of {mask} from which on {changed_words(verdict)} changes by at most "
            f"{limit_words(verdict, verdict.tolerance)} on average: {each}."
        )
    return lines


def _of_quarters(findings: Findings, model: str) -> SparseVerdict:
    """The unit of what was run at several lengths, also where the inputs as they are say nothing."""
    table = findings(quarter_table)
    measure = str(table.loc[table["model"] == model, "measure"].iloc[0])
    perplexity = measure == "loss" and next_token(findings, model)
    return SparseVerdict("", measure=measure, perplexity=perplexity, tolerance=tolerance_of(findings, measure))


def needed_words(row: Mapping[str, Any]) -> str:
    """Return the k that a length needs, and its share of the keys.

    Args:
        row: of :func:`smallest_enough`.

    Example:
        >>> needed_words({"k": 32, "kept": 0.21, "largest": 64}), needed_words({"k": None, "largest": 64})
        ('32 (21%)', 'above 64')
    """
    return f"above {row['largest']}" if pd.isna(row["k"]) else f"{row['k']} ({percent(row['kept'])}%)"


def budget_lines(findings: Findings, model: str) -> list[str]:
    """Return the changes by each budget of a model, and on which samples; empty without budgets.

    Args:
        findings: with budgets.
        model: its path.
    """
    content = findings(budget_content, model)
    sentences = []
    for name, budget in content["budgets"].items():
        tested = budget["tested"]
        first, last = tested["samples"]
        change = SparseVerdict(
            "", measure=tested["measure"], change=tested["change"], low=tested["interval"][0],
            high=tested["interval"][1], samples=last - first + 1,
        )  # fmt: skip
        held = {True: "within", False: "not within", None: "too few samples to tell whether within"}
        within = f", {held[tested['holds']]} {limit_words(change, content['tolerance'])}"
        within = within if math.isfinite(tested["change"]) else ""
        sentences.append(f"{name} keeps {percent(budget['share'])}% of the keys and {cost_words(change)}{within}")
    if not sentences:
        return []
    return [
        f"Budgets, chosen on samples 0 to {first - 1} and run on {first} to {last}, which had no part in the "
        f"choice: {'; '.join(sentences)}."
    ]
