"""Is sparse attention enough? The verdict in a sentence, and what stands behind it."""

import math
from functools import partial

from semdiag.measuring.findings.estimates import drawn
from semdiag.measuring.findings.findings import Findings
from semdiag.measuring.findings.number_words import interval_words, keys_words, percent
from semdiag.presenting.drawing.panels import model_labels
from semdiag.questions.bounds.answer.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.questions.k_sweep.answer.rerun import budget_content
from semdiag.questions.k_sweep.answer.sparse_verdict import MASS, SparseVerdict, sparse_glance, sparse_verdict
from semdiag.questions.k_sweep.answer.summary import conditions_defined, conditions_met

_CHANGES = {
    "loss": "changes the loss by {}",
    "divergence": "changes the output distribution by {} (KL divergence)",
    "output_change": "changes the outputs by {} of their norm",
}
_ROUNDING = 5e-5  # nats: what is smaller is rounding, or might as well be
_WHY = {
    "near_uniform": "the attention is near uniform, half of the queries weigh their keys almost evenly",
    "chance": "the model predicts no better than chance (untrained?)",
    "control": "as many random keys do as little harm: what is measured does not depend on the attention",
    "drops_nothing": "no query has more keys than any k that was run, so nothing was dropped",
    "few_samples": "too few samples for an interval",
    "not_finite": "the change at k = {k} is not a finite number (outputs are NaN or infinite, their norm is 0, or "
    "a probability becomes 0)",
    "fixed_mask": "its mask does not rank keys by their scores",
    "own_mask": "it was trained to keep its k largest scores, and was not run with fewer",
    "not_measured": "it was not measured",
}


def verdict_sentence(found: SparseVerdict, model: str) -> str:
    """The verdict in one sentence, the first that is said of a sweep anywhere.

    Args:
        found: the verdict.
        model: its path, for the command that would tell more.
    """
    if found.reason == "not_rerun":
        weight = (
            f"no k up to the largest measured keeps {MASS:.0%} of the weight"
            if found.k is None
            else f"k = {found.k}{_share(found)} keeps {percent(found.mass, 1)}% of the weight"
        )
        return (
            f"cannot tell before it is run with masks: {weight}; to measure what a mask costs: semdiag k-sweep "
            f"{model} --rerun."
        )
    if found.reason:
        return f"cannot tell: {_WHY[found.reason].format(k=found.k)}."
    said = _CHANGES[found.measure].format(_amount(found.measure, found.change, True))
    interval = f"(95 % interval {_amount(found.measure, found.low)} to {_amount(found.measure, found.high)})"
    if found.answer == "plausible":
        return (
            f"plausible: k = {found.k} per query{_share(found)} {said} {interval}, keeps "
            f"{percent(found.mass, 1)}% of the weight."
        )
    if found.high <= found.tolerance:
        return (
            f"not without loss: of the k that were run, {found.k}{_share(found)} is the smallest that stays "
            f"within {found.tolerance:g}."
        )
    return f"not without loss: even k = {found.k} per query{_share(found)} {said} {interval}."


def k_sweep_in_short(findings: Findings) -> list[str]:
    """The verdict of one model, or how many of several could do with sparse attention.

    Args:
        findings: with a sweep.
    """
    models = list(findings.measurements.models["model"])
    if len(models) == 1:
        sentence = verdict_sentence(findings(sparse_verdict, models[0]), models[0])
        return [sentence[0].upper() + sentence[1:]]
    glance = findings(sparse_glance)
    return [f"Sparse attention, {glance.answer}: {glance.number} {glance.words}."]


def k_sweep_sentences(findings: Findings) -> list[str]:
    """Each model's verdict; then how it was found, and in how many cases the paper's conditions are met.

    Args:
        findings: with a sweep.
    """
    labels = model_labels(findings.measurements.models)
    return [f"{label}: {' '.join(verdict_lines(findings, model))}" for model, label in labels.items()]


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """The verdict's sentence first; the others say what it rests on.

    Args:
        findings: with a sweep.
        model: its path.
    """
    found = findings(sparse_verdict, model)
    lines = [verdict_sentence(found, model)]
    if found.samples:
        before = 0.0 if abs(found.before) < _ROUNDING else found.before
        known = f"{before:.4g} nats" if math.isfinite(before) else "not a finite number"
        what = f" Without a mask the loss is {known}." if found.measure == "loss" else ""
        lines.append(
            f"Run with masks on {found.samples} sample{'s' * (found.samples != 1)}.{what} A k is enough if the "
            f"upper end of its interval, and of that of every larger k, is at most {found.tolerance:g}."
        )
    elif found.reason == "near_uniform":
        lines.append(f"Its loss may tell: semdiag k-sweep {model} --rerun.")
    if len(findings.measurements.budgets):
        lines += budget_lines(findings, model)
    if found.queries and not math.isnan(found.share):
        lines.append(
            f"Weight kept is the mean over {found.queries:,} queries with more than {keys_words(found.k or 0)}; "
            f"{found.left_out:,} with no more keys are left out, as the mask drops nothing there."
        )
    facts = findings.measurements.models.set_index("model").loc[model]
    if facts["attention"] == "topk":
        run = found.samples or found.reason == "drops_nothing"
        these = "everything is computed over the keys that it keeps" if run else "these are its scores"
        lines.append(f"The model was trained with top-k attention, k = {facts['k']}: {these}.")
    if model in drawn(findings):
        lines.append(
            "Queries were drawn: the weight kept is estimated from them, and the paper's conditions, which need "
            "extremes and loads over every query, are not judged."
        )
    return lines + _conditions_lines(findings, model, found.k)


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
        said = f"by no k in any of {cases}"
    elif asked in met:
        said = f"by k = {asked} in {met[asked]} of {cases}; most often by k = {best}, in {met[best]}"
    else:
        said = f"most often by k = {best}, in {met[best]} of {cases}"
    return [f"{what} are met {said}."]


def budget_lines(findings: Findings, model: str) -> list[str]:
    """What each budget of a model changes, and on which samples that was found; none if it has no budgets.

    Args:
        findings: with budgets.
        model: its path.
    """
    content = findings(budget_content, model)
    said = []
    for name, budget in content["budgets"].items():
        tested = budget["tested"]
        change = _amount(tested["measure"], tested["change"], True)
        low, high = tested["interval"]
        interval = interval_words(low, high, partial(_amount, tested["measure"]))
        within = f", {'within' if tested['holds'] else 'not within'} {content['tolerance']:g}"
        within = within if math.isfinite(tested["change"]) else ""
        said.append(
            f"{name} keeps {percent(budget['share'])}% of the keys and "
            f"{_CHANGES[tested['measure']].format(change)} ({interval}){within}"
        )
        first, last = tested["samples"]
    if not said:
        return []
    return [
        f"Budgets, chosen on samples 0 to {first - 1} and run on {first} to {last}, which had no part in the "
        f"choice: {'; '.join(said)}."
    ]


def _share(found: SparseVerdict) -> str:
    return f" ({found.share:.0%} of the keys)" if not math.isnan(found.share) else ""


def _amount(measure: str, value: float, unit: bool = False) -> str:
    if not math.isfinite(value):
        return "no finite number"
    if measure == "output_change":
        return f"{value:.1%}"
    value = 0.0 if abs(value) < _ROUNDING else value
    return f"{value:+.3g} nats" if unit else f"{value:+.3g}"
