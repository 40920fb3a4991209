"""Is sparse attention enough, and with which k? The answer with its tables."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import pandas as pd

from semdiag.measuring.findings.estimates import sampled_models, sampling_facts
from semdiag.measuring.findings.findings import Findings, Summary, records
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.measuring.words import Value, interval, number, number_from_json, percent, plain, text
from semdiag.presenting.answer import (
    Answer,
    Claim,
    Collapsible,
    Outcome,
    Shown,
    numbered_claims,
    sentences_of,
    title,
    with_facts,
)
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.drawing.style import mask_style
from semdiag.presenting.tables import NEVER, Column, NumberTable
from semdiag.questions.bounds.corollary import JUDGED_PERCENTILES
from semdiag.questions.k_sweep.budgets import BUDGET_TABLE, KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.changes import (
    all_alike,
    budget_content,
    change_table,
    condition_table,
    failure_claims,
    length_table,
    refused_kinds,
    smallest_enough,
    unit_of,
    without_rounding,
)
from semdiag.questions.k_sweep.measure import K_SWEEP_TABLE, SWEEP_ESTIMATES
from semdiag.questions.k_sweep.rerun import NO_MASK
from semdiag.questions.k_sweep.wording import (
    cheaper_random_claims,
    grounds,
    kinds_lines,
    mask_name,
    sparse_glance,
    sparse_verdict,
    verdict_lines,
)

SCOPE = (
    "Within one model: its own scores, if each query kept only its k largest. A model trained with that k has "
    "other scores, so this does not compare trained models."
)


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
    return [
        claim,
        *numbered_claims("kinds", kinds_lines(findings, models[0]), models[0]),
        *cheaper_random_claims(findings, models[0]),
        *numbered_claims("kind-not-run", refused_kinds(findings, models[0]), models[0]),
    ]


def _details(findings: Findings) -> list[Claim]:
    """Return the grounds of each verdict; of several models the verdicts, too, which the headline only counts."""
    labels = model_labels(findings.measurements.models)
    details = []
    for model, label in labels.items():
        lines = verdict_lines(findings, model) if len(labels) > 1 else list(grounds(findings, model))
        if lines:
            verdict = findings(sparse_verdict, model).answer
            details.append(Claim("grounds", f"{label}: {' '.join(lines)}", model, verdict=verdict))
        if len(labels) > 1:
            for claim in cheaper_random_claims(findings, model):
                details.append(replace(claim, sentence=f"{label}: {claim.sentence}"))
    return details


_EVERY_UP_TO = 8  # every k up to this one is shown, then every fourth; the CSV has all
_STEP = 4
_NO_STREAM = (
    "Change of stream is left out: through which matrix a head writes into the stream is known for certain of "
    "models that semdiag trained, run unchanged with the keys that they keep."
)


def _change(value: Value) -> str:
    return number(without_rounding(number_from_json(value)))


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
        return interval(without_rounding(low), without_rounding(high), between=" to ")
    return "none seen" if row["seen"] == 0 else "all alike" if all_alike(row) else "none"


# On a narrow terminal stays what the verdict stands on: the change with its interval, harm, and the control.
_RERUN = (
    Column("name", "mask", text), Column("kept", "keys", percent, drop=8),
    Column("weight_kept", "weight", percent, drop=7), Column("head_change", "change of head", drop=5),
    Column("stream_change", "change of stream", drop=4),
    Column("change", "change of {}", _change, drop=NEVER), Column("", "95% interval", _interval, drop=NEVER),
    Column("harmed harmed_high", "harmed", _harmed, drop=NEVER), Column("random", form=_change),
    Column("growth", "ppl ×", _growth, drop=6), Column("divergence", "KL", _change, drop=1),
    Column("changed", form=percent, drop=2), Column("accuracy", form=percent, drop=3),
)  # fmt: skip
_SWEEP = (
    Column("k"), Column("ratio.p50", "δ(k)/δ_s p50"), Column("ratio.p95", "p95"),
    Column("separation.p50", "Δ(k) p50"), Column("separation.p5", "p5"), Column("weight_kept.mean", "weight mean"),
    Column("weight_kept.p5", "p5"), Column("weight_kept_without_first.mean", "no first", drop=7),
    Column("head_change.mean", "change of head"), Column("stream_change.mean", "change of stream"),
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
        yield from sentences_of(cheaper_random_claims(findings, model))
    if result["rerun"]:
        yield _rerun_table(result["rerun"])
        yield from _unknown(result["rerun"])
    yield from grounds(findings, model)
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
            **row, "name": mask_name(row, several), "random": control.get(row["k"]),
            "growth": row["change"] if measure == "loss" else None,
        }
        for row in shown
    ]  # fmt: skip
    return NumberTable(_RERUN, rows, unit=measure.removesuffix("_change"))


def _unknown(rows: Sequence[Summary]) -> Iterator[str]:
    top = [row for row in rows if row["mask"] == TOP_K and math.isnan(row["weight_kept"])]
    above = [row["k"] for row in top if row["kept"] < 1]
    keeping_all = [row["k"] for row in top if row["kept"] == 1]
    if above:
        ks = ", ".join(map(str, above))
        yield f"Weight and change of head of k = {ks} are unknown: the sweep ends below (--max-k)."
    if keeping_all:
        yield f"No query has more keys than k = {', '.join(map(str, keeping_all))}: nothing is dropped."
    masks = {row["mask"] for row in rows}
    if TOP_K in masks and masks - {NO_MASK, TOP_K, RANDOM}:
        yield f"Weight and change of head are those of {mask_style(TOP_K).name} alone."


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
        notes.append(f"Change of head was not computed at k = {', '.join(without)}.")
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
