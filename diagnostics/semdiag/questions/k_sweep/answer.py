"""Is sparse attention enough, and with which k? Plausible, not without loss, or inconclusive; and the grounds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from semdiag.presenting.answer import Answer, Folded, Glance, Outcome, title, with_facts
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
    failure_sentences,
    harmless,
    judged_conditions,
    kind_of_unit,
    length_table,
    rounded,
    smallest_enough,
    smallest_from,
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
    sweep = rows_of_model(findings.measurements[K_SWEEP_TABLE], model)
    masses = sweep[(sweep["layer"] == ALL) & (sweep["quantity"] == "weight_kept")].set_index("k")
    again = rows_of_model(findings(change_table), model)
    top = records(again[(again["mask"] == TOP_K) & (again["kept"] < 1)].sort_values("k"))
    if not top:
        return _by_weight(findings, model, masses, ran=len(again) > 0)
    unit = unit_of(findings, model)
    limit = tolerance_of(findings, unit.measure)
    answer, row, words = _judged(top, again, limit, unit)
    weight = _weight(masses, int(row["k"]))
    known = answer == Outcome.PLAUSIBLE and "weight_kept" in weight
    kept = f", keeps {percent(weight['weight_kept'], strict=True)} of the weight" if known else ""
    estimated = words.startswith("k =") or answer != Outcome.OPEN
    head = "" if answer == Outcome.OPEN and estimated else f"{answer}: "
    return SparseVerdict(
        answer, f"{head}{words}{kept}.", int(row["k"]), unit.cost(row) if estimated else "", **weight,
        measure=unit.measure, perplexity=unit.perplexity, tolerance=limit,
        **{name: row[name] for name in _OF_THE_ROW},
    )  # fmt: skip


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


def _judged(top: Sequence[Row], again: pd.DataFrame, limit: float, unit: Unit) -> tuple[Outcome, Row, str]:
    """Return the answer of reruns, the row that decides, and the words of both; k in ascending order."""
    stays = smallest_from(top, lambda row: within(row, limit))
    safe = smallest_from(top, lambda row: harmless(row, limit))
    sparse = [row for row in top if row["kept"] <= MOST_KEYS]
    last = sparse[-1] if sparse else top[-1]
    answer, row, more = Outcome.OPEN, last, ""
    costly = Outcome.COSTS if unit.measure == "loss" else Outcome.CHANGES
    if safe is not None and safe["kept"] <= MOST_KEYS:
        answer, row = Outcome.PLAUSIBLE, safe
    elif stays is not None and stays["kept"] <= MOST_KEYS:
        row, many = stays, stays["units"]
        more = f"{round(stays['harmed'] * many)} of {units_of(stays)} change by more than "
        more += (
            f"{unit.limit(HARM * limit, True)}, and {limit_of_share(stays['harmed_high'], kind_of_unit(stays))}"
        )
        if stays["chunk"] or many < LEAST_SAMPLES:
            more += f": inconclusive with fewer than {counted(LEAST_SAMPLES, 'sample')}"
    elif stays is not None and not sparse:
        row, more = stays, "no k of at most half of the keys was run"
    elif unknown := [each for each in (top[-1], last) if not math.isfinite(each["change"])]:
        row, more = unknown[0], "inconclusive: some outputs are no finite numbers"
    elif not costs(last, limit):
        needed = _samples_needed(last, limit)
        more = f"inconclusive against {unit.limit(limit)} with {units_of(last)}"
        more += f"; about {needed:,} would decide" if needed and not last["chunk"] else ""
    elif stays is not None:
        answer = costly
        more = f"within {unit.limit(limit)} needs {stays['k']} ({stays['kept']:.0%} of the keys)"
    else:
        answer, row = costly, top[-1] if costs(top[-1], limit) else last
    chance = math.log(row["classes"]) if unit.measure == "loss" and row["classes"] > 1 else math.inf
    if _CHANCE * chance <= row["before"] < math.inf:
        return Outcome.OPEN, row, "the model predicts no better than chance (untrained?)"
    control = records(again[(again["mask"] == RANDOM) & (again["k"] == row["k"])])
    if answer != costly and control and within(control[0], limit):
        why = "as many random keys do as little harm: what is measured does not depend on the attention"
        return Outcome.OPEN, row, why
    even = "even " * (answer == costly and not more)
    words = f"{even}k = {row['k']} per query ({row['kept']:.0%} of the keys) {unit.cost(row)}"
    return answer, row, words + f"; {more}" * bool(more)


def _samples_needed(row: Row, limit: float) -> int | None:
    """Estimate how many samples decide whether a change is within a limit; None if that is unknown."""
    half, distance = (row["high"] - row["low"]) / 2, abs(limit - row["change"])
    if not (half > 0 and distance > 0):
        return LEAST_SAMPLES if math.isnan(half) else None
    return max(LEAST_SAMPLES, math.ceil(float(row["units"]) * float(half / distance) ** 2))


def sparse_glance(findings: Findings) -> Glance:
    """Return whether sparse attention suffices: for one model its k, for several how many need how few keys."""
    verdicts = [findings(sparse_verdict, model) for model in findings.measurements.models["model"]]
    if len(verdicts) == 1 and verdicts[0].cost:
        (one,) = verdicts
        number, (_, _, words) = f"k = {one.k}", one.sentence.rstrip(".").partition(f"k = {one.k} ")
        return Glance(Outcome(one.answer), number, words)
    judged = [each for each in verdicts if each.answer != Outcome.OPEN]
    if not judged and failed_reruns(findings):
        return Glance(Outcome.OPEN, "failed", "when it was run with masks")
    if not judged and any(each.k is not None and not each.samples for each in verdicts):
        run = "with masks; to measure what sparse attention costs: semdiag k-sweep MODEL --rerun"
        return Glance(Outcome.OPEN, "not run", run)
    if not judged:
        return Glance(Outcome.OPEN, f"0 of {counted(len(verdicts), 'model')}", "can be judged")
    plausible = [each for each in judged if each.answer == Outcome.PLAUSIBLE]
    costly = Outcome.COSTS if all(each.measure == "loss" for each in judged) else Outcome.CHANGES
    words = "that were run with masks need at most half of their keys"
    words += f" (k = {span_words([each.k for each in plausible if each.k], '{}')})" if plausible else ""
    words += f"; {len(verdicts) - len(judged)} more cannot be judged" if len(judged) < len(verdicts) else ""
    answer = Outcome.PLAUSIBLE if len(plausible) == len(judged) else costly
    return Glance(answer, f"{len(plausible)} of {counted(len(judged), 'model')}", words)


def verdict_lines(findings: Findings, model: str) -> list[str]:
    """Return the verdict's sentence, followed by its grounds."""
    return [findings(sparse_verdict, model).sentence, *kinds_lines(findings, model), *_grounds(findings, model)]


def kinds_lines(findings: Findings, model: str) -> list[str]:
    """Return the changes by other kinds of sparse attention at the verdict's k, least first."""
    verdict, again = findings(sparse_verdict, model), rows_of_model(findings(change_table), model)
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
    verdict, again = findings(sparse_verdict, model), rows_of_model(findings(change_table), model)
    yield from length_lines(findings, model)
    if verdict.samples:
        unit, samples = unit_of(findings, model), counted(verdict.samples, "sample")
        before = f"{rounded(verdict.before):.4g} nats" if math.isfinite(verdict.before) else "not a finite number"
        without = f" Without a mask the loss is {before}." * (unit.measure == "loss")
        yield (
            f"Run with masks on {samples}.{without} A k is enough if the upper end of its interval, and of that "
            f"of every larger k, is at most {unit.limit(verdict.tolerance, True)}, and at most {MOST_HARMED:.0%} "
            f"of the inputs can change by more than {unit.limit(HARM * verdict.tolerance, True)}."
        )
        if (row := records(again)[0])["chunk"]:
            yield (
                f"Intervals are over {units_of(row)}, of {counted(row['chunk'], 'token')} or more: they are about "
                f"more of {kind_of_unit(row).removeprefix('chunks of ')}, not about others, and too narrow where "
                "neighbouring chunks are alike. No k is plausible by them."
            )
        unseen: dict[str, list[str]] = {}  # masks that changed no sample, by how many inputs they may change
        for row in records(again[(again["seen"] == 0) & (again["mask"] != NO_MASK)]):
            unseen.setdefault(unit.without_interval(row), []).append(_name(row, True))
        yield from (f"With {', '.join(names)}: {words}." for words, names in unseen.items())
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
        these = "everything is computed over the keys that it keeps" if len(again) else "these are its scores"
        yield f"The model was trained with top-k attention, k = {facts['k']}: {these}."
    if model in sampled_models(findings):
        yield (
            "Queries were drawn: the weight kept is estimated from them, and the paper's conditions, which need "
            "extremes and loads over every query, are not judged."
        )
    yield from _conditions_lines(findings, model, verdict.k)


def length_lines(findings: Findings, model: str) -> Iterator[str]:
    """Yield sentences on the k that each kind of mask needs at each length of texts."""
    if rows_of_model(findings(length_table), model).empty:
        return
    unit = unit_of(findings, model)
    needed, limit = findings(smallest_enough, model), unit.limit(tolerance_of(findings, unit.measure))
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
    met, what = conditions_met(findings, model), "The paper's conditions of Corollary 1"
    if not met:
        return
    best, cases = max(met, key=lambda each: met[each]), f"{len(CLAIMS) * len(JUDGED_PERCENTILES)} cases"
    cases += " (W and X at p75, p90 and p95)"
    if not np.isfinite(judged_conditions(findings, model)["left_side"]).any():
        yield f"{what} have no value at any k: what they divide by, δ_s or Δ_h(k), is 0."
    elif not met[best]:
        yield f"{what} are met by no measured k in any of {cases}."
    elif k in met:
        yield f"{what} are met by k = {k} in {met[k]} of {cases}; most often by k = {best}, in {met[best]}."
    else:
        yield f"{what} are met most often by k = {best}, in {met[best]} of {cases}."


_HELD = {True: "within", False: "not within", None: "inconclusive against"}


def _budget_lines(findings: Findings, model: str) -> Iterator[str]:
    content, again = findings(budget_content, model), rows_of_model(findings(change_table), model)
    rows = {row["mask"]: row for row in records(again)}
    sentences, first, last = [], 0, 0
    for name, budget in content["budgets"].items():
        tested = budget["tested"]
        (first, last), unit = tested["samples"], Unit(tested["measure"])
        held = f", {_HELD[tested['holds']]} {unit.limit(content['tolerance'])}" * math.isfinite(tested["change"])
        share = percent(budget["share"], ".0f", strict=True)
        sentences.append(f"{name} keeps {share} of the keys and {unit.cost(rows[name])}{held}")
    if sentences:
        yield (
            f"Budgets, chosen on samples 0 to {first - 1} and run on {first} to {last}, which had no part in the "
            f"choice: {'; '.join(sentences)}."
        )


_EVERY_UP_TO, _STEP = 8, 4  # every k up to 8, then every fourth; the CSV has all
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
    low, high = number_from_json(row["low"]), number_from_json(row["high"])
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
    models, labels = [*measurements.models["model"]], model_labels(measurements.models)
    results: dict[str, Summary] = {}
    shown: list[str | NumberTable | Folded] = []
    for model in models:
        results[model] = result = _result(findings, model)
        verdict = [findings(sparse_verdict, model).sentence, *kinds_lines(findings, model)]
        shown += [f"{title(findings, model)}: within this model, by k", *(verdict if len(models) > 1 else ())]
        shown += [_rerun_table(result["rerun"]), *_unknown(result["rerun"])] if result["rerun"] else []
        shown += _grounds(findings, model)
        shown += [_every_k(result)] if result["sweep"] else []
    sweep = measurements[K_SWEEP_TABLE]
    tables = {"k_sweep": sweep[sweep["layer"] == ALL], "k_sweep_conditions": findings(condition_table)}
    tables |= {"k_sweep_rerun": findings(change_table), "k_sweep_lengths": findings(length_table)}
    glance = findings(sparse_glance)
    headline = [f"Sparse attention, {glance.answer}: {glance.number} {glance.words}."]
    if len(models) == 1:
        sentence = findings(sparse_verdict, models[0]).sentence
        first = sentence[:1] if sentence.startswith("k =") else sentence[:1].upper()
        headline = [first + sentence[1:], *kinds_lines(findings, models[0])]
    return Answer(
        glance,
        [*failure_sentences(findings), *headline],
        [f"{label}: {' '.join(verdict_lines(findings, model))}" for model, label in labels.items()],
        tables={
            name: _swept(findings, table)
            for name, table in tables.items()
            if len(table) or name in ("k_sweep", "k_sweep_conditions")
        },
        tables_alone={"k_sweep": _swept(findings, sweep)},
        results=results,
        more={"scope": SCOPE},
        shown=[*shown, SCOPE],
    )


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
            **row, "name": _name(row, several), "random": control.get(row["k"]),
            "growth": row["change"] if measure == "loss" else None,
        }
        for row in shown
    ]  # fmt: skip
    return NumberTable(_RERUN, rows, unit=measure.replace("_", " "))


def _unknown(rows: Sequence[Summary]) -> Iterator[str]:
    top = [row for row in rows if row["mask"] == TOP_K and math.isnan(row["weight_kept"])]
    above = [row["k"] for row in top if row["kept"] < 1]
    kept = [row["k"] for row in top if row["kept"] == 1]
    if above:
        yield f"Weight and Δ head of k = {', '.join(map(str, above))} are unknown: the sweep ends below (--max-k)."
    if kept:
        yield f"No query has more keys than k = {', '.join(map(str, kept))}: nothing is dropped."
    masks = {row["mask"] for row in rows}
    if TOP_K in masks and masks - {NO_MASK, TOP_K, RANDOM}:
        yield "Weight and Δ head are those of topk alone."


def _name(row: Row, several: bool) -> str:
    if row["k"] < 0:
        return str(row["mask"])
    return f"{row['mask']} {row['k']}{'%' * (row['mask'] == 'topp')}" if several else f"k = {row['k']}"


def _every_k(result: Summary) -> Folded:
    """Return a row a k, what it would keep, and notes on what is missing; folded: how many k were measured."""
    rows: dict[int, Summary] = {}
    for one in result["sweep"]:
        if one["layer"] == ALL:
            rows.setdefault(one["k"], {"k": one["k"]})[one["quantity"]] = one
    rows = {k: rows[k] for k in sorted(rows) if "weight_kept" in rows[k]}
    always = {result["verdict"]["k"], max(rows)}
    shown = [row for k, row in rows.items() if k <= _EVERY_UP_TO or k % _STEP == 0 or k in always]
    for row in shown:
        for name in "WX":
            met = [
                one["met"] for one in result["conditions"]
                if (one["k"], one["parameter"]) == (row["k"], name) and one["percentile"] in JUDGED_PERCENTILES
            ]  # fmt: skip
            row[name] = f"{sum(met)} of {len(met)}" if met else None
    names = {column.name.partition(".")[0] for column in _SWEEP}
    without = [str(row["k"]) for row in shown if "head_change" not in row]
    notes = [f"Δ head was not computed at k = {', '.join(without)}."] if 0 < len(without) < len(shown) else []
    notes += [] if any(one["quantity"] == "stream_change" for one in result["sweep"]) else [_NO_STREAM]
    table = NumberTable(_SWEEP, [dict.fromkeys(names) | row for row in shown])
    return Folded(
        [f"Weight, δ(k), Δ(k), load and ξ of {len(rows)} k were measured: --all shows them."], [table, *notes]
    )
