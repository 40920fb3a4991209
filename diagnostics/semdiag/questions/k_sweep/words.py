"""Is sparse attention enough? Grounds of the verdict, other kinds of masks, places, budgets."""

import math
from collections.abc import Iterator, Mapping
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
from semdiag.questions.k_sweep.answer.rerun import ROUNDING, budget_content, change_table, tolerance_of
from semdiag.questions.k_sweep.answer.sparse_verdict import (
    Unit,
    sparse_glance,
    sparse_verdict,
    unit_of,
    units_of,
)
from semdiag.questions.k_sweep.answer.summary import conditions_defined, conditions_met
from semdiag.questions.k_sweep.measure.kinds import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.measure.passes import NO_MASK
from semdiag.questions.k_sweep.measure.rerun import HARM, MOST_HARMED


def k_sweep_in_short(findings: Findings) -> list[str]:
    """Return the verdict on one model, or how many of several models work with sparse attention."""
    models = list(findings.measurements.models["model"])
    if len(models) == 1:
        sentence = findings(sparse_verdict, models[0]).sentence
        start = sentence[:1] if sentence.startswith("k =") else sentence[:1].upper()
        return [start + sentence[1:], *kinds_lines(findings, models[0])]
    glance = findings(sparse_glance)
    return [f"Sparse attention, {glance.answer}: {glance.number} {glance.words}."]


def k_sweep_sentences(findings: Findings) -> list[str]:
    """Return each model's verdict, its grounds, and in how many cases the paper's conditions are met."""
    labels = model_labels(findings.measurements.models)
    return [f"{label}: {' '.join(verdict_lines(findings, model))}" for model, label in labels.items()]


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """Return the verdict's sentence, followed by its grounds."""
    verdict = findings(sparse_verdict, model)
    lines = [verdict.sentence, *kinds_lines(findings, model), *place_lines(findings, model)]
    again = findings(change_table)
    again = again[again["model"] == model]
    if verdict.samples:
        unit = unit_of(findings, model)
        before = 0.0 if abs(verdict.before) < ROUNDING else verdict.before
        known = f"{before:.4g} nats" if math.isfinite(before) else "not a finite number"
        what = f" Without a mask the loss is {known}." if verdict.measure == "loss" else ""
        lines.append(
            f"Run with masks on {counted(verdict.samples, 'sample')}.{what} A k is enough if "
            f"the upper end of its interval, and of that of every larger k, is at most "
            f"{unit.limit(verdict.tolerance, True)}, and at most {MOST_HARMED:.0%} of the inputs can change "
            f"by more than {unit.limit(HARM * verdict.tolerance, True)}."
        )
        if (row := records(again)[0])["chunk"]:
            lines.append(
                f"Intervals are over {units_of(row)} within {counted(verdict.samples, 'sample')}: they are about "
                "more text of the same samples, not about others."
            )
        lines += _unseen_lines(unit, records(again[(again["seen"] == 0) & (again["mask"] != NO_MASK)]))
    if len(findings.measurements.budgets):
        lines += budget_lines(findings, model)
    if verdict.queries:
        lines.append(
            f"Weight kept is the mean over {verdict.queries:,} queries with more than "
            f"{counted(verdict.k or 0, 'key')}; {verdict.left_out:,} with no more keys are left out, "
            "as the mask drops nothing there."
        )
    facts = findings.measurements.models.set_index("model").loc[model]
    if facts["attention"] == "topk":
        these = "everything is computed over the keys that it keeps" if len(again) else "these are its scores"
        lines.append(f"The model was trained with top-k attention, k = {facts['k']}: {these}.")
    if model in drawn(findings):
        lines.append(
            "Queries were drawn: the weight kept is estimated from them, and the paper's conditions, which need "
            "extremes and loads over every query, are not judged."
        )
    return lines + _conditions_lines(findings, model, verdict.k)


def _unseen_lines(unit: Unit, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say of masks that changed no sample how many inputs they may change."""
    said: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row['mask']} {row['k']}" if row["k"] >= 0 else row["mask"]
        said.setdefault(unit.without_interval(row), []).append(name)
    for words, masks in said.items():
        yield f"With {', '.join(masks)}: {words}."


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
    """Return the changes by other kinds of sparse attention at the verdict's k, least first."""
    verdict, again = findings(sparse_verdict, model), findings(change_table)
    if not verdict.samples or verdict.k is None:
        return []
    again = again[(again["model"] == model) & (again["k"] == verdict.k) & again["mask"].isin(KINDS)]
    if not set(again["mask"]) - {TOP_K, RANDOM}:
        return []
    unit = unit_of(findings, model)
    rows = sorted(records(again), key=lambda row: math.inf if math.isnan(row["change"]) else row["change"])
    each = ", ".join(f"{row['mask']} {unit.amount(row['change'], True)}" for row in rows)
    return [f"Change of {unit.what} with {counted(verdict.k, 'key')} of each kind: {each}."]


def place_lines(findings: Findings, model: str) -> list[str]:
    """Return sentences on top-k's changes from the first to the last quarter of texts, and the k per length."""
    verdict, table = findings(sparse_verdict, model), findings(quarter_table)
    own = table[(table["model"] == model) & (table["length"] == 0) & (table["quarter"] != WHOLE)]
    own = own[(own["mask"] == TOP_K) & (own["k"] == verdict.k)].sort_values("quarter")
    needed = findings(smallest_enough, model)
    if own.empty and needed.empty:
        return []
    unit, lines = unit_of(findings, model), []
    if len(own) and unit.perplexity:
        each = ", ".join(unit.amount(change, True) for change in own["change"])
        lines.append(
            f"Change of perplexity by top-k with {counted(verdict.k or 0, 'key')}, from the first to the last "
            f"quarter of the positions: {each}. Early positions have few keys to lose."
        )
    limit = unit.limit(tolerance_of(findings, unit.measure))
    for mask, rows in needed[needed["mask"] != RANDOM].groupby("mask", sort=False):
        each = ", ".join(f"{needed_words(row)} at {row['length']} tokens" for row in records(rows))
        lines.append(
            f"Smallest k of {mask} from which on {unit.what} changes by at most {limit} on average: {each}."
        )
    return lines


def needed_words(row: Mapping[str, Any]) -> str:
    """Return the k that a length needs, and its share of the keys."""
    return f"above {row['largest']}" if pd.isna(row["k"]) else f"{row['k']} ({percent(row['kept'])}%)"


def budget_lines(findings: Findings, model: str) -> list[str]:
    """Return the changes by each budget of a model, and on which samples; empty without budgets."""
    content, again = findings(budget_content, model), findings(change_table)
    rows = {row["mask"]: row for row in records(again[again["model"] == model])}
    sentences, first, last = [], 0, 0
    for name, budget in content["budgets"].items():
        tested, row = budget["tested"], rows[name]
        (first, last), unit = tested["samples"], Unit(tested["measure"])
        held = {True: "within", False: "not within", None: "too few samples to tell whether within"}
        within = f", {held[tested['holds']]} {unit.limit(content['tolerance'])}"
        within = within if math.isfinite(tested["change"]) else ""
        sentences.append(f"{name} keeps {percent(budget['share'])}% of the keys and {unit.cost(row)}{within}")
    if not sentences:
        return []
    return [
        f"Budgets, chosen on samples 0 to {first - 1} and run on {first} to {last}, which had no part in the "
        f"choice: {'; '.join(sentences)}."
    ]
