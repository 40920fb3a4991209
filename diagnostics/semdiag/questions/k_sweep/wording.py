"""The verdict on sparse attention in words: its sentence, its tile, and the grounds on which it stands."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_call import DENSE, HEAVY_HITTERS
from semdiag.measuring.findings.estimates import sampled_models
from semdiag.measuring.findings.findings import Findings, records
from semdiag.measuring.table import rows_of_model
from semdiag.measuring.words import counted, limit_of_share, number, percent, span_words
from semdiag.presenting.answer import Claim, Glance, Outcome
from semdiag.presenting.drawing.style import mask_style
from semdiag.questions.bounds.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.changes import (
    Row,
    Unit,
    budget_content,
    change_table,
    conditions_met,
    failed_reruns,
    judged_conditions,
    kind_of_unit,
    length_table,
    refused_kinds,
    smallest_enough,
    texts_of,
    tolerance_of,
    unit_of,
    units_of,
    without_rounding,
)
from semdiag.questions.k_sweep.judging import (
    ENOUGH_WEIGHT,
    Judgement,
    Reason,
    WeightOfK,
    cheaper_random,
    judgement_of,
    samples_needed,
    smallest_k_by_weight,
    weight_of_k,
    weights_by_k,
)
from semdiag.questions.k_sweep.rerun import HARM, LEAST_SAMPLES, MOST_HARMED, NO_MASK


@dataclass(frozen=True)
class SparseVerdict:
    """Whether top-k attention suffices in a model without retraining."""

    answer: str  # ``plausible``, ``not without loss`` or ``inconclusive``
    sentence: str  # the answer in a sentence
    k: int | None = None
    cost: str = ""  # what k changes, in words; empty where that says nothing
    kept: float = math.nan  # share of all keys that k keeps
    weight_kept: float = math.nan  # mean attention weight that k keeps of queries with more than k keys
    queries: int = 0  # such queries
    left_out: int = 0  # queries with at most k keys, of which nothing is dropped
    # what changes: loss (nats per target), divergence (nats per position) or output_change (relative)
    measure: str = ""
    # whether the loss is that of the next token, so that exp(change) is a factor of perplexity
    perplexity: bool = False
    tolerance: float = math.nan  # largest change that counts as none
    change: float = math.nan  # the change at k, and its interval over samples
    low: float = math.nan  # end of the interval
    high: float = math.nan  # end of the interval
    before: float = math.nan  # the loss without a mask
    harmed: float = math.nan  # the share of samples that change by more than HARM times the tolerance
    harmed_high: float = math.nan  # one-sided limit of that share
    samples: int = 0  # that were run
    units: int = 0  # over which the interval is: the samples, or chunks of few
    chunk: int = 0  # tokens of a chunk; 0: units are samples


_OF_THE_ROW = "kept", "change", "low", "high", "before", "harmed", "harmed_high", "samples", "units", "chunk"


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether the k largest scores of each query suffice for a model."""
    judgement = findings(judgement_of, model)
    if judgement is None:
        return _by_weight(findings, model, ran=len(rows_of_model(findings(change_table), model)) > 0)
    unit = unit_of(findings, model)
    row = judgement.row
    return SparseVerdict(
        judgement.answer,
        _verdict_sentence(findings, model, judgement, unit),
        int(row["k"]),
        unit.cost(row) if judgement.estimates_cost else "",
        **_weight_facts(weight_of_k(findings, model, int(row["k"]))),
        measure=unit.measure,
        perplexity=unit.perplexity,
        tolerance=tolerance_of(findings, unit.measure),
        **{name: row[name] for name in _OF_THE_ROW},
    )


def _verdict_sentence(findings: Findings, model: str, judgement: Judgement, unit: Unit) -> str:
    if judgement.reason == Reason.AT_CHANCE:
        return f"{judgement.answer}: the model predicts no better than chance (untrained?)."
    if judgement.reason == Reason.LIKE_RANDOM_KEYS:
        return (
            f"{judgement.answer}: as many random keys do as little harm: what is measured does not depend on the "
            "attention."
        )
    words = f"k = {judgement.row['k']} {_cost_words(findings, model, judgement, unit)}."
    if judgement.answer == Outcome.OPEN:
        return words
    even = "even " if judgement.reason == Reason.COSTLY else ""
    return f"{judgement.answer}: {even}{words}"


def _cost_words(findings: Findings, model: str, judgement: Judgement, unit: Unit) -> str:
    """Return what the k of a judgement keeps and costs, and on what the answer rests."""
    row = judgement.row
    words = f"per query ({row['kept']:.0%} of the keys) {unit.cost(row)}"
    if ground := _ground_words(judgement, tolerance_of(findings, unit.measure), unit):
        words += f"; {ground}"
    if judgement.answer == Outcome.PLAUSIBLE and not math.isnan(row["weight_kept"]):
        words += f", keeps {percent(row['weight_kept'], strict=True)} of the weight"
    return words


def _ground_words(judgement: Judgement, limit: float, unit: Unit) -> str:
    row = judgement.row
    match judgement.reason:
        case Reason.SOME_HARMED:
            harmed = f"{round(row['harmed'] * row['units'])} of {units_of(row)}"
            may = limit_of_share(row["harmed_high"], kind_of_unit(row))
            words = f"{harmed} change by more than {unit.limit(HARM * limit, True)}, and {may}"
            if row["chunk"] or row["units"] < LEAST_SAMPLES:
                words += f": inconclusive with fewer than {counted(LEAST_SAMPLES, 'sample')}"
            return words
        case Reason.NOTHING_SPARSE:
            return "no k of at most half of the keys was run"
        case Reason.NOT_FINITE:
            return "inconclusive: some outputs are no finite numbers"
        case Reason.TOO_FEW_SAMPLES:
            words = f"inconclusive against {unit.limit(limit)} with {units_of(row)}"
            needed = samples_needed(row, limit)
            if needed and not row["chunk"]:
                words += f"; about {needed:,} would decide"
            return words
        case Reason.NEEDS_MORE_KEYS if judgement.needed is not None:
            share = f"{judgement.needed['kept']:.0%} of the keys"
            return f"within {unit.limit(limit)} needs {judgement.needed['k']} ({share})"
    return ""


def _weight_facts(weight: WeightOfK | None) -> dict[str, Any]:
    if weight is None:
        return {}
    return {"weight_kept": weight.weight_kept, "queries": weight.queries, "left_out": weight.left_out}


def _by_weight(findings: Findings, model: str, ran: bool) -> SparseVerdict:
    """Return what the sweep says of a model that was not run with masks of top-k that drop keys."""
    attention = rows_of_model(findings.measurements.models, model)["attention"].iloc[0]
    if attention not in (*DENSE, *HEAVY_HITTERS, "bottomk"):
        return SparseVerdict(Outcome.OPEN, "inconclusive: its mask does not rank keys by their scores.")
    if ran or weights_by_k(findings, model).empty or attention not in DENSE:
        return SparseVerdict(Outcome.OPEN, "inconclusive: no mask of top-k that drops keys was run.")
    weight = smallest_k_by_weight(findings, model)
    k = None if weight is None else weight.k
    words = f"no k up to the largest measured keeps {ENOUGH_WEIGHT:.0%} of the weight"
    if weight is not None:
        words = f"k = {k} keeps {percent(weight.weight_kept, strict=True)} of the weight"
    facts = _weight_facts(weight)
    if model in failed_reruns(findings):
        return SparseVerdict(Outcome.OPEN, f"inconclusive: its run with masks failed; {words}.", k, **facts)
    run = f"to measure what a mask costs: semdiag k-sweep {model} --rerun"
    sentence = f"inconclusive before it is run with masks: {words}; {run}."
    return SparseVerdict(Outcome.OPEN, sentence, k, **facts)


def sparse_glance(findings: Findings) -> Glance:
    """Return whether sparse attention suffices: for one model its k, for several how many need how few keys."""
    models = list(findings.measurements.models["model"])
    verdicts = [findings(sparse_verdict, model) for model in models]
    if len(models) == 1 and (judgement := findings(judgement_of, models[0])) and judgement.estimates_cost:
        words = _cost_words(findings, models[0], judgement, unit_of(findings, models[0]))
        return Glance(judgement.answer, f"k = {judgement.row['k']}", words, claim_id="verdict")
    claim_id = "verdict" if len(models) > 1 else ""
    judged = [verdict for verdict in verdicts if verdict.answer != Outcome.OPEN]
    if judged:
        return _counting_glance(judged, len(verdicts) - len(judged), claim_id)
    number = f"0 of {counted(len(verdicts), 'model')}"
    words = "can be judged"
    if failed_reruns(findings):
        number = "failed"
        words = "when it was run with masks"
    elif any(verdict.k is not None and not verdict.samples for verdict in verdicts):
        number = "not run"
        words = "with masks; to measure what sparse attention costs: semdiag k-sweep MODEL --rerun"
    return Glance(Outcome.OPEN, number, words, claim_id=claim_id)


def _counting_glance(judged: Sequence[SparseVerdict], unjudged: int, claim_id: str) -> Glance:
    """Return how many of the judged models need at most half of their keys."""
    plausible = [verdict for verdict in judged if verdict.answer == Outcome.PLAUSIBLE]
    answer = Outcome.PLAUSIBLE
    if len(plausible) < len(judged):
        answer = Outcome.COSTS if all(verdict.measure == "loss" for verdict in judged) else Outcome.CHANGES
    words = "that were run with masks need at most half of their keys"
    if plausible:
        words += f" (k = {span_words([verdict.k for verdict in plausible if verdict.k], '{}')})"
    if unjudged:
        words += f"; {unjudged} more cannot be judged"
    return Glance(answer, f"{len(plausible)} of {counted(len(judged), 'model')}", words, claim_id=claim_id)


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """Return the verdict's sentence, followed by its grounds."""
    sentences = [findings(sparse_verdict, model).sentence, *kinds_lines(findings, model)]
    return [*sentences, *refused_kinds(findings, model), *grounds(findings, model)]


def kinds_lines(findings: Findings, model: str) -> list[str]:
    """Return the changes by other kinds of sparse attention at the verdict's k, least first."""
    verdict = findings(sparse_verdict, model)
    again = rows_of_model(findings(change_table), model)
    if not verdict.samples or verdict.k is None:
        return []
    again = again[(again["k"] == verdict.k) & again["mask"].isin(KINDS)]
    if not set(again["mask"]) - {TOP_K, RANDOM}:
        return []
    unit = unit_of(findings, model)
    rows = sorted(records(again), key=lambda row: math.inf if math.isnan(row["change"]) else row["change"])
    each = ", ".join(f"{mask_style(row['mask']).name}: {unit.amount(row['change'], True)}" for row in rows)
    return [f"Change of {unit.what} with {counted(verdict.k, 'key')} of each kind: {each}."]


def cheaper_random_claims(findings: Findings, model: str) -> list[Claim]:
    """Return the claim that random keys cost less than the largest, and why; none where they do not."""
    control = findings(cheaper_random, model)
    if control is None:
        return []
    words = f"Random keys cost less than the largest at k = {', '.join(map(str, control.ks))}"
    if control.overconfident:
        random_accuracy = percent(control.random_accuracy, ".0f")
        accuracy = percent(control.accuracy, ".0f")
        words += (
            f", though at most {random_accuracy} of the answers are right (top-k: {accuracy}): a wrong one costs "
            f"{number(control.random_error_loss)} nats instead of {number(control.error_loss)}. With too few of "
            "its keys the model errs and is sure; with random ones it is unsure"
        )
    return [Claim("cheaper-random", f"{words}.", model, control.largest_excess, "nats")]


def grounds(findings: Findings, model: str) -> Iterator[str]:
    """Yield what a verdict stands on."""
    verdict = findings(sparse_verdict, model)
    changes = rows_of_model(findings(change_table), model)
    yield from length_lines(findings, model)
    if verdict.samples:
        yield from _run_lines(verdict, changes, unit_of(findings, model))
    if len(findings.measurements[BUDGET_TABLE]):
        yield from _budget_lines(findings, model)
    if verdict.queries:
        yield (
            f"Weight kept is the mean over {counted(verdict.queries, 'query')} with more than "
            f"{counted(verdict.k or 0, 'key')}; {verdict.left_out:,} with no more keys are left out, "
            "as the mask drops nothing there."
        )
    facts = rows_of_model(findings.measurements.models, model).iloc[0]
    if facts["attention"] == "topk":
        subject = "everything is computed over the keys that it keeps" if len(changes) else "these are its scores"
        yield f"The model was trained with top-k attention, k = {facts['k']}: {subject}."
    if model in sampled_models(findings):
        yield (
            "Queries were drawn: the weight kept is estimated from them, and the paper's conditions, which need "
            "extremes and loads over every query, are not judged."
        )
    yield from _conditions_lines(findings, model, verdict.k)


def _run_lines(verdict: SparseVerdict, changes: pd.DataFrame, unit: Unit) -> Iterator[str]:
    """Yield on what a model was run, what counts as enough, and which masks changed nothing."""
    words = f"Run with masks on {counted(verdict.samples, 'sample')}."
    if unit.measure == "loss":
        before = (
            f"{without_rounding(verdict.before):.4g} nats"
            if math.isfinite(verdict.before)
            else "not a finite number"
        )
        words += f" Without a mask the loss is {before}."
    yield (
        f"{words} A k is enough if the upper end of its interval, and of that "
        f"of every larger k, is at most {unit.limit(verdict.tolerance, True)}, and at most {MOST_HARMED:.0%} "
        f"of the inputs can change by more than {unit.limit(HARM * verdict.tolerance, True)}."
    )
    first = records(changes)[0]
    if first["chunk"]:
        yield (
            f"Intervals are over {units_of(first)}, of {counted(first['chunk'], 'token')} or more: they are about "
            f"more of {texts_of(first)}, not about others, and too narrow where "
            "neighbouring chunks are alike. No k is plausible by them."
        )
    unchanged: dict[str, list[str]] = {}  # masks that changed no sample, by how many inputs they may change
    for row in records(changes[(changes["seen"] == 0) & (changes["mask"] != NO_MASK)]):
        unchanged.setdefault(unit.without_interval(row), []).append(mask_name(row, True))
    yield from (f"With {'; '.join(names)}: {words}." for words, names in unchanged.items())


def length_lines(findings: Findings, model: str) -> Iterator[str]:
    """Yield sentences on the k that each kind of mask needs at each length of texts."""
    if rows_of_model(findings(length_table), model).empty:
        return
    unit = unit_of(findings, model)
    needed = findings(smallest_enough, model)
    limit = unit.limit(tolerance_of(findings, unit.measure))
    for mask, rows in needed[needed["mask"] != RANDOM].groupby("mask", sort=False):
        each = ", ".join(f"{needed_words(row)} at {counted(row['length'], 'token')}" for row in records(rows))
        name = mask_style(str(mask)).name
        yield f"Smallest k of {name} from which on {unit.what} changes by at most {limit} on average: {each}."


def needed_words(row: Row) -> str:
    """Return the k that a length needs, and its share of the keys."""
    return (
        f"above {row['largest']}"
        if pd.isna(row["k"])
        else f"{row['k']} ({percent(row['kept'], '.0f', strict=True)})"
    )


def _conditions_lines(findings: Findings, model: str, k: int | None) -> Iterator[str]:
    met = conditions_met(findings, model)
    if not met:
        return
    conditions = "The paper's conditions of Corollary 1"
    best = max(met, key=lambda each: met[each])
    cases = f"{len(CLAIMS) * len(JUDGED_PERCENTILES)} cases (W and X at p75, p90 and p95)"
    if not np.isfinite(judged_conditions(findings, model)["left_side"]).any():
        yield f"{conditions} have no value at any k: what they divide by, δ_s or Δ_h(k), is 0."
    elif not met[best]:
        yield f"{conditions} are met by no measured k in any of {cases}."
    elif k in met:
        yield f"{conditions} are met by k = {k} in {met[k]} of {cases}; most often by k = {best}, in {met[best]}."
    else:
        yield f"{conditions} are met most often by k = {best}, in {met[best]} of {cases}."


_LIMIT_WORDS = {True: "within", False: "not within", None: "inconclusive against"}


def _budget_lines(findings: Findings, model: str) -> Iterator[str]:
    content = findings(budget_content, model)
    rows = {row["mask"]: row for row in records(rows_of_model(findings(change_table), model))}
    parts = []
    samples = [0, 0]
    for name, budget in content["budgets"].items():
        tested = budget["tested"]
        samples = tested["samples"]
        unit = Unit(tested["measure"])
        words = (
            f"{name} keeps {percent(budget['share'], '.0f', strict=True)} of the keys and {unit.cost(rows[name])}"
        )
        if math.isfinite(tested["change"]):
            words += f", {_LIMIT_WORDS[tested['holds']]} {unit.limit(content['tolerance'])}"
        parts.append(words)
    if parts:
        yield (
            f"Budgets, chosen on samples 0 to {samples[0] - 1} and run on {samples[0]} to {samples[1]}, which had "
            f"no part in the choice: {'; '.join(parts)}."
        )


def mask_name(row: Row, several: bool) -> str:
    """Return a mask's name: its k alone, unless several kinds were run."""
    if row["k"] < 0:
        return str(row["mask"])
    if not several:
        return f"k = {row['k']}"
    size = f"{row['k']}%" if row["mask"] == "topp" else f"k = {row['k']}"
    return f"{mask_style(row['mask']).name}, {size}"
