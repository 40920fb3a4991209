"""Is sparse attention enough, and with which k? Plausible, not without loss, or inconclusive; and the grounds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from semdiag.capturing.attention_call import DENSE, HEAVY_HITTERS
from semdiag.measuring.findings.estimates import sampled_models, sampling_facts
from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.measuring.words import (
    Value,
    counted,
    interval,
    limit_of_share,
    number,
    number_from_json,
    percent,
    plain,
    span_words,
    text,
)
from semdiag.presenting.answer import (
    Answer,
    Claim,
    Collapsible,
    Glance,
    Outcome,
    Shown,
    numbered_claims,
    title,
    with_facts,
)
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.bounds.corollary import CLAIMS, JUDGED_PERCENTILES
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.changes import (
    Row,
    Unit,
    all_alike,
    budget_content,
    change_table,
    condition_table,
    conditions_met,
    costs,
    failed_reruns,
    failure_claims,
    harmless,
    judged_conditions,
    kind_of_unit,
    length_table,
    rounded,
    smallest_enough,
    smallest_from,
    texts_of,
    tolerance_of,
    unit_of,
    units_of,
    within,
)
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE, SWEEP_ESTIMATES
from semdiag.questions.k_sweep.rerun import HARM, LEAST_SAMPLES, MOST_HARMED, NO_MASK

ENOUGH_WEIGHT = 0.95  # of the attention weight, where nothing else is known
MOST_KEYS = 0.5  # share of all keys above which a mask is hardly sparse
_CHANCE = 0.99  # of ln C: a loss above it is no better than that of C equally likely classes
SCOPE = (
    "Within one model: its own scores, if each query kept only its k largest. A model trained with that k has "
    "other scores, so this does not compare trained models."
)


class Reason(StrEnum):
    """What decides on top-k attention."""

    HARMLESS = "from a sparse k on, the change is within the limit, and few inputs change by much more"
    SOME_HARMED = "the mean change is within the limit, but too many inputs may change by much more"
    NOTHING_SPARSE = "only masks of more than half of the keys were run"
    NOT_FINITE = "some outputs are no finite numbers"
    TOO_FEW_SAMPLES = "the limit is inside the interval of the change"
    NEEDS_MORE_KEYS = "the change is above the limit up to half of the keys, and within it for a larger k"
    COSTLY = "the change is above the limit for every k"
    AT_CHANCE = "the model predicts no better than chance"
    LIKE_RANDOM_KEYS = "as many random keys change as little"


@dataclass(frozen=True)
class Judgement:
    """What reruns with top-k masks say, without words."""

    answer: Outcome
    row: Row  # the run that decides
    reason: Reason
    needed: Row | None = None  # the smallest run within the limit, where that is not sparse

    @property
    def estimates_cost(self) -> bool:
        """Return whether the change at the row's k says what its mask costs."""
        return self.reason not in (Reason.AT_CHANCE, Reason.LIKE_RANDOM_KEYS)


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


def judgement_of(findings: Findings, model: str) -> Judgement | None:
    """Judge the reruns of a model with top-k masks; None if no mask that drops keys was run."""
    changes = rows_of_model(findings(change_table), model)
    top = records(changes[(changes["mask"] == TOP_K) & (changes["kept"] < 1)].sort_values("k"))
    if not top:
        return None
    measure = unit_of(findings, model).measure
    limit = tolerance_of(findings, measure)
    judgement = _judged_changes(top, limit, measure)
    row = judgement.row
    chance = math.log(row["classes"]) if measure == "loss" and row["classes"] > 1 else math.inf
    if _CHANCE * chance <= row["before"] < math.inf:
        return Judgement(Outcome.OPEN, row, Reason.AT_CHANCE)
    control = records(changes[(changes["mask"] == RANDOM) & (changes["k"] == row["k"])])
    if judgement.answer in (Outcome.OPEN, Outcome.PLAUSIBLE) and control and within(control[0], limit):
        return Judgement(Outcome.OPEN, row, Reason.LIKE_RANDOM_KEYS)
    return judgement


def _judged_changes(top: Sequence[Row], limit: float, measure: str) -> Judgement:
    """Judge the changes by masks of top-k, k in ascending order, against a limit."""
    stays = smallest_from(top, lambda row: within(row, limit))
    safe = smallest_from(top, lambda row: harmless(row, limit))
    sparse = [row for row in top if row["kept"] <= MOST_KEYS]
    last = sparse[-1] if sparse else top[-1]
    if safe is not None and safe["kept"] <= MOST_KEYS:
        return Judgement(Outcome.PLAUSIBLE, safe, Reason.HARMLESS)
    if stays is not None and stays["kept"] <= MOST_KEYS:
        return Judgement(Outcome.OPEN, stays, Reason.SOME_HARMED)
    if stays is not None and not sparse:
        return Judgement(Outcome.OPEN, stays, Reason.NOTHING_SPARSE)
    for row in (top[-1], last):
        if not math.isfinite(row["change"]):
            return Judgement(Outcome.OPEN, row, Reason.NOT_FINITE)
    if not costs(last, limit):
        return Judgement(Outcome.OPEN, last, Reason.TOO_FEW_SAMPLES)
    return _costly(top[-1], last, stays, limit, measure)


def _costly(largest: Row, last_sparse: Row, stays: Row | None, limit: float, measure: str) -> Judgement:
    """Judge changes that are above a limit at half of the keys: is any measured k enough?"""
    answer = Outcome.COSTS if measure == "loss" else Outcome.CHANGES
    if stays is not None:
        return Judgement(answer, last_sparse, Reason.NEEDS_MORE_KEYS, stays)
    return Judgement(answer, largest if costs(largest, limit) else last_sparse, Reason.COSTLY)


def sparse_verdict(findings: Findings, model: str) -> SparseVerdict:
    """Judge whether the k largest scores of each query suffice for a model."""
    sweep = rows_of_model(findings.measurements[K_SWEEP_TABLE], model)
    masses = sweep[(sweep["layer"] == ALL) & (sweep["quantity"] == "weight_kept")].set_index("k")
    judgement = findings(judgement_of, model)
    if judgement is None:
        return _by_weight(findings, model, masses, ran=len(rows_of_model(findings(change_table), model)) > 0)
    unit = unit_of(findings, model)
    row = judgement.row
    return SparseVerdict(
        judgement.answer,
        _verdict_sentence(findings, model, judgement, unit),
        int(row["k"]),
        unit.cost(row) if judgement.estimates_cost else "",
        **_weight(masses, int(row["k"])),
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
            needed = _samples_needed(row, limit)
            if needed and not row["chunk"]:
                words += f"; about {needed:,} would decide"
            return words
        case Reason.NEEDS_MORE_KEYS if judgement.needed is not None:
            share = f"{judgement.needed['kept']:.0%} of the keys"
            return f"within {unit.limit(limit)} needs {judgement.needed['k']} ({share})"
    return ""


def _weight(masses: pd.DataFrame, k: int) -> dict[str, Any]:
    if k not in masses.index:
        return {}
    left_out = int(masses["undefined"][k])
    return {
        "weight_kept": float(masses["mean"][k]),
        "queries": int(masses["queries"][k]) - left_out,
        "left_out": left_out,
    }


def _by_weight(findings: Findings, model: str, masses: pd.DataFrame, ran: bool) -> SparseVerdict:
    """Return what the sweep says of a model that was not run with masks of top-k that drop keys."""
    attention = rows_of_model(findings.measurements.models, model)["attention"].iloc[0]
    if attention not in (*DENSE, *HEAVY_HITTERS, "bottomk"):
        return SparseVerdict(Outcome.OPEN, "inconclusive: its mask does not rank keys by their scores.")
    if ran or masses.empty or attention not in DENSE:
        return SparseVerdict(Outcome.OPEN, "inconclusive: no mask of top-k that drops keys was run.")
    enough = masses.index[masses["mean"] >= ENOUGH_WEIGHT]
    k = int(enough[0]) if len(enough) else None
    weight = {} if k is None else _weight(masses, k)
    words = f"no k up to the largest measured keeps {ENOUGH_WEIGHT:.0%} of the weight"
    words = f"k = {k} keeps {percent(weight['weight_kept'], strict=True)} of the weight" if weight else words
    if model in failed_reruns(findings):
        return SparseVerdict(Outcome.OPEN, f"inconclusive: its run with masks failed; {words}.", k, **weight)
    run = f"to measure what a mask costs: semdiag k-sweep {model} --rerun"
    sentence = f"inconclusive before it is run with masks: {words}; {run}."
    return SparseVerdict(Outcome.OPEN, sentence, k, **weight)


def _samples_needed(row: Row, limit: float) -> int | None:
    """Estimate how many samples decide whether a change is within a limit; None if that is unknown."""
    half = (row["high"] - row["low"]) / 2
    distance = abs(limit - row["change"])
    if not (half > 0 and distance > 0):
        return LEAST_SAMPLES if math.isnan(half) else None
    return max(LEAST_SAMPLES, math.ceil(float(row["units"]) * float(half / distance) ** 2))


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


def _headline(findings: Findings) -> list[Claim]:
    """Return the verdict on one model with other kinds of masks, or how many of several need few keys."""
    models = list(findings.measurements.models["model"])
    if len(models) > 1:
        glance = findings(sparse_glance)
        sentence = f"Sparse attention, {glance.answer}: {glance.sentence}"
        return [Claim("verdict", sentence, verdict=glance.answer)]
    verdict = findings(sparse_verdict, models[0])
    sentence = verdict.sentence
    if verdict.answer != Outcome.OPEN or not verdict.cost:  # it does not begin with k, a symbol
        sentence = f"{sentence[:1].upper()}{sentence[1:]}"
    unit = unit_of(findings, models[0])
    interval = (verdict.low, verdict.high)
    claim = Claim("verdict", sentence, models[0], verdict.change, unit.measure, interval, verdict.answer)
    return [claim, *numbered_claims("kinds", kinds_lines(findings, models[0]), models[0])]


def _details(findings: Findings) -> list[Claim]:
    """Return the grounds of each verdict; of several models the verdicts, too, which the headline only counts."""
    labels = model_labels(findings.measurements.models)
    details = []
    for model, label in labels.items():
        lines = verdict_lines(findings, model) if len(labels) > 1 else list(_grounds(findings, model))
        if lines:
            verdict = findings(sparse_verdict, model).answer
            details.append(Claim("grounds", f"{label}: {' '.join(lines)}", model, verdict=verdict))
    return details


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """Return the verdict's sentence, followed by its grounds."""
    return [findings(sparse_verdict, model).sentence, *kinds_lines(findings, model), *_grounds(findings, model)]


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
    each = ", ".join(f"{row['mask']} {unit.amount(row['change'], True)}" for row in rows)
    return [f"Change of {unit.what} with {counted(verdict.k, 'key')} of each kind: {each}."]


def _grounds(findings: Findings, model: str) -> Iterator[str]:
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
        before = f"{rounded(verdict.before):.4g} nats" if math.isfinite(verdict.before) else "not a finite number"
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
        unchanged.setdefault(unit.without_interval(row), []).append(_mask_name(row, True))
    yield from (f"With {', '.join(names)}: {words}." for words, names in unchanged.items())


def length_lines(findings: Findings, model: str) -> Iterator[str]:
    """Yield sentences on the k that each kind of mask needs at each length of texts."""
    if rows_of_model(findings(length_table), model).empty:
        return
    unit = unit_of(findings, model)
    needed = findings(smallest_enough, model)
    limit = unit.limit(tolerance_of(findings, unit.measure))
    for mask, rows in needed[needed["mask"] != RANDOM].groupby("mask", sort=False):
        each = ", ".join(f"{needed_words(row)} at {counted(row['length'], 'token')}" for row in records(rows))
        yield f"Smallest k of {mask} from which on {unit.what} changes by at most {limit} on average: {each}."


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


_EVERY_UP_TO = 8  # every k up to this one is shown, then every fourth; the CSV has all
_STEP = 4
_NO_STREAM = (
    "Δ stream is left out: through which matrix a head writes into the stream is known for certain of models that "
    "semdiag trained, run unchanged with the keys that they keep."
)


def _change(value: Value) -> str:
    return number(rounded(number_from_json(value)))


def _growth(change: Value) -> str:
    value = number_from_json(change)
    return number(math.inf if value > 700 else math.exp(value))


def _harmed(share: Value, high: Value) -> str:
    return "–" if math.isnan(number_from_json(share)) else f"{percent(share)} (≤ {percent(high)})"


def _interval(row: Summary) -> str:
    """Return the interval of a change, or in a few words why there is none."""
    low = number_from_json(row["low"])
    high = number_from_json(row["high"])
    if math.isfinite(low) and math.isfinite(high):
        return interval(rounded(low), rounded(high), between=" to ")
    return "none seen" if row["seen"] == 0 else "all alike" if all_alike(row) else "none"


# On a narrow terminal stays what the verdict stands on: the change with its interval, harm, and the control.
_RERUN = (
    Column("name", "mask", text), Column("kept", "keys", percent, drop=8),
    Column("weight_kept", "weight", percent, drop=7), Column("head_change", "Δ head", drop=5),
    Column("stream_change", "Δ stream", drop=4),
    Column("change", "Δ {}", _change, drop=NEVER), Column("", "95% interval", _interval, drop=NEVER),
    Column("harmed harmed_high", "harmed", _harmed, drop=NEVER), Column("random", form=_change),
    Column("growth", "ppl ×", _growth, drop=6), Column("divergence", "KL", _change, drop=1),
    Column("changed", form=percent, drop=2), Column("accuracy", form=percent, drop=3),
)  # fmt: skip
_SWEEP = (
    Column("k"), Column("ratio.p50", "δ(k)/δ_s p50"), Column("ratio.p95", "p95"),
    Column("separation.p50", "Δ(k) p50"), Column("separation.p5", "p5"), Column("weight_kept.mean", "weight mean"),
    Column("weight_kept.p5", "p5"), Column("weight_kept_without_first.mean", "no first", drop=7),
    Column("head_change.mean", "Δ head"), Column("stream_change.mean", "Δ stream"),
    Column("load.p95", "load p95", drop=6), Column("load.p100", "p100", drop=4),
    Column("ln_sound.p50", "ln ξ p50", drop=5), Column("ln_paper.p50", "paper p50", drop=3),
    Column("W", "W met", plain, drop=1), Column("X", "X met", plain, drop=2),
)  # fmt: skip


def answer(findings: Findings) -> Answer:
    """Return whether sparse attention is enough, what masks change, and what every k would keep."""
    measurements = findings.measurements
    models = list(measurements.models["model"])
    results = {model: _result(findings, model) for model in models}
    shown = [part for model in models for part in _shown(findings, model, results[model], len(models) > 1)]
    sweep = measurements[K_SWEEP_TABLE]
    tables = {"k_sweep": sweep[sweep["layer"] == ALL], "k_sweep_conditions": findings(condition_table)}
    for name, table in (("k_sweep_rerun", findings(change_table)), ("k_sweep_lengths", findings(length_table))):
        if len(table):
            tables[name] = table
    return Answer(
        findings(sparse_glance),
        [*failure_claims(findings), *_headline(findings)],
        _details(findings),
        tables={name: _swept(findings, table) for name, table in tables.items()},
        tables_alone={"k_sweep": _swept(findings, sweep)},
        results=results,
        more={"scope": SCOPE},
        shown=[*shown, SCOPE],
    )


def _shown(findings: Findings, model: str, result: Summary, several: bool) -> Iterator[Shown]:
    """Yield the lines and tables about a model on the terminal; the verdict only if nothing before says it."""
    yield f"{title(findings, model)}: within this model, by k"
    if several:
        yield findings(sparse_verdict, model).sentence
        yield from kinds_lines(findings, model)
    if result["rerun"]:
        yield _rerun_table(result["rerun"])
        yield from _unknown(result["rerun"])
    yield from _grounds(findings, model)
    if result["sweep"]:
        yield _every_k(result)


def _swept(findings: Findings, table: pd.DataFrame) -> pd.DataFrame:
    return with_facts(findings, table.rename(columns={"k": "swept_k"}))


def _result(findings: Findings, model: str) -> Summary:
    measurements = findings.measurements
    tables = {"rerun": findings(change_table), "by_length": findings(length_table)}
    tables |= {"conditions": findings(condition_table), "sweep": measurements[K_SWEEP_TABLE]}
    result: Summary = {"unit": "nats", "verdict": asdict(findings(sparse_verdict, model))}
    result |= {name: records(rows_of_model(table, model).drop(columns="model")) for name, table in tables.items()}
    result["lengths"] = records(findings(smallest_enough, model))
    if len(rows_of_model(measurements[BUDGET_TABLE], model)):
        result["budgets"] = findings(budget_content, model)
    if model in sampled_models(findings):
        estimates = rows_of_model(measurements[SWEEP_ESTIMATES], model).drop(columns="model")
        result["sampled"] = {**sampling_facts(findings, model), "estimates": records(estimates)}
    return result


def _rerun_table(rows: Sequence[Summary]) -> NumberTable:
    measure = rows[0]["measure"]
    several = bool({row["mask"] for row in rows if row["mask"] in KINDS} - {TOP_K, RANDOM})
    control = {} if several else {row["k"]: row["change"] for row in rows if row["mask"] == RANDOM}
    shown = [row for row in rows if row["mask"] not in (NO_MASK, "" if several else RANDOM)]
    rows = [
        {
            **row, "name": _mask_name(row, several), "random": control.get(row["k"]),
            "growth": row["change"] if measure == "loss" else None,
        }
        for row in shown
    ]  # fmt: skip
    return NumberTable(_RERUN, rows, unit=measure.replace("_", " "))


def _unknown(rows: Sequence[Summary]) -> Iterator[str]:
    top = [row for row in rows if row["mask"] == TOP_K and math.isnan(row["weight_kept"])]
    above = [row["k"] for row in top if row["kept"] < 1]
    keeping_all = [row["k"] for row in top if row["kept"] == 1]
    if above:
        yield f"Weight and Δ head of k = {', '.join(map(str, above))} are unknown: the sweep ends below (--max-k)."
    if keeping_all:
        yield f"No query has more keys than k = {', '.join(map(str, keeping_all))}: nothing is dropped."
    masks = {row["mask"] for row in rows}
    if TOP_K in masks and masks - {NO_MASK, TOP_K, RANDOM}:
        yield "Weight and Δ head are those of topk alone."


def _mask_name(row: Row, several: bool) -> str:
    if row["k"] < 0:
        return str(row["mask"])
    if not several:
        return f"k = {row['k']}"
    unit = "%" if row["mask"] == "topp" else ""
    return f"{row['mask']} {row['k']}{unit}"


def _every_k(result: Summary) -> Collapsible:
    """Return a row a k, what it would keep, and notes on what is missing; collapsed: how many k were measured."""
    rows = _pooled_by_k(result["sweep"])
    always = {result["verdict"]["k"], max(rows)}
    shown = [row for k, row in rows.items() if k <= _EVERY_UP_TO or k % _STEP == 0 or k in always]
    empty = dict.fromkeys(column.name.partition(".")[0] for column in _SWEEP)
    table = NumberTable(_SWEEP, [empty | row | _conditions_of(result, row["k"]) for row in shown])
    notes = []
    without = [str(row["k"]) for row in shown if "head_change" not in row]
    if 0 < len(without) < len(shown):
        notes.append(f"Δ head was not computed at k = {', '.join(without)}.")
    if not any(entry["quantity"] == "stream_change" for entry in result["sweep"]):
        notes.append(_NO_STREAM)
    hidden = f"Weight, δ(k), Δ(k), load and ξ of {len(rows)} k were measured: --all shows them."
    return Collapsible([hidden], [table, *notes])


def _pooled_by_k(sweep: Sequence[Summary]) -> dict[int, Summary]:
    """Return the quantities of all layers together by k, where the weight that it keeps is known."""
    rows: dict[int, Summary] = {}
    for entry in sweep:
        if entry["layer"] == ALL:
            rows.setdefault(entry["k"], {"k": entry["k"]})[entry["quantity"]] = entry
    return {k: rows[k] for k in sorted(rows) if "weight_kept" in rows[k]}


def _conditions_of(result: Summary, k: int) -> dict[str, str | None]:
    """Return in how many of its judged cases a k meets each of the paper's conditions; None if in none judged."""
    cells: dict[str, str | None] = {}
    for parameter in "WX":
        met = [
            entry["met"]
            for entry in result["conditions"]
            if (entry["k"], entry["parameter"]) == (k, parameter) and entry["percentile"] in JUDGED_PERCENTILES
        ]
        cells[parameter] = f"{sum(met)} of {len(met)}" if met else None
    return cells
