"""The k-sweep in words: grounds of the verdict, other kinds of masks, places, budgets, terminal tables."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import torch

from semdiag.mathematics.bounds.corollary import paper_input_condition, paper_weight_condition
from semdiag.measuring.findings.estimates import drawing, drawn
from semdiag.measuring.findings.findings import MODEL_FACTS, Findings, Summary, json_object, records
from semdiag.measuring.table import ALL
from semdiag.measuring.words import (
    FEWEST,
    Value,
    counted,
    interval,
    number,
    number_from_json,
    percent,
    whole_percent,
)
from semdiag.presenting.drawing.panels import model_labels
from semdiag.presenting.question import title
from semdiag.presenting.section import NEVER, Column, NumberTable, plain, say_sentences, text, wide_console
from semdiag.questions.bounds.answer import CLAIMS, JUDGED_PERCENTILES, PAPER_PERCENTILES, separation_rounding
from semdiag.questions.k_sweep.answer import (
    ROUNDING,
    WHOLE,
    Unit,
    budget_content,
    change_table,
    quarter_table,
    smallest_enough,
    sparse_glance,
    sparse_verdict,
    tolerance_of,
    unit_of,
    units_of,
)
from semdiag.questions.k_sweep.budgets import KINDS, RANDOM, TOP_K
from semdiag.questions.k_sweep.rerun import HARM, MOST_HARMED, NO_MASK

SCOPE = (
    "Within one model: its own scores, if each query kept only its k largest. A model trained with that k has "
    "other scores, so this does not compare trained models."
)


def condition_table(findings: Findings) -> pd.DataFrame:
    """Return both conditions of Corollary 1 within each model, for every k, at matching percentiles."""
    rows = []
    for model, own in findings.measurements.sweep.groupby("model", sort=False):
        pooled = {(str(row["quantity"]), row["k"]): row for row in records(own[own["layer"] == ALL])}
        if ("dispersion", 0) not in pooled or model in drawn(findings):
            continue
        full = _cuts(pooled["dispersion", 0])
        rounding = separation_rounding(findings.measurements, str(model), float(full[-1]))
        for k in sorted(own.loc[own["quantity"] == "separation", "k"].unique()):
            delta, load = _cuts(pooled["dispersion", k]), _cuts(pooled["load", k]) / int(k)
            gap = _cuts(pooled["separation", k], mirrored=True)
            gap = torch.where(gap.isnan(), torch.inf, gap.where(gap.abs() > rounding, 0.0))
            sides = {
                "W": paper_weight_condition(full, delta, gap),
                "X": paper_input_condition(full, delta, gap, load),
            }
            for parameter, condition in sides.items():
                for at, percentile in enumerate(PAPER_PERCENTILES):
                    left = float(condition.left_side[at])
                    row = {"model": model, "k": int(k), "percentile": percentile, "parameter": parameter}
                    rows.append({**row, "left_side": left, "met": bool(condition.met[at])})
    table = pd.DataFrame(rows, columns=["model", "k", "percentile", "parameter", "left_side", "met"])
    return table.astype({"k": "int64", "percentile": "int64", "left_side": "float64", "met": "bool"})  # if empty


def _cuts(row: Mapping[Any, Any], mirrored: bool = False) -> torch.Tensor:
    names = [f"p{100 - p if mirrored else p}" for p in PAPER_PERCENTILES]
    return torch.tensor([row[name] for name in names], dtype=torch.float64)


def conditions_met(findings: Findings, model: str) -> dict[int, int]:
    """In how many of 6 cases (W and X at p75, p90 and p95) each k meets the paper's conditions."""
    counts = _judged(findings, model).groupby("k")["met"].sum()
    return {int(str(k)): int(count) for k, count in counts.items()}


def conditions_defined(findings: Findings, model: str) -> bool:
    """Return whether any of these cases has a finite left side, at any k."""
    return bool(np.isfinite(_judged(findings, model)["left_side"].astype(float)).any())


def _judged(findings: Findings, model: str) -> pd.DataFrame:
    table = findings(condition_table)
    return table[(table["model"] == model) & table["percentile"].isin(JUDGED_PERCENTILES)]


def k_sweep_summary(findings: Findings) -> Summary:
    """Return the results and the verdict of a sweep for every model."""
    measurements = findings.measurements
    conditions, again, quarters = (findings(table) for table in (condition_table, change_table, quarter_table))
    results = []
    for row in measurements.models.to_dict("records"):
        own = measurements.sweep[measurements.sweep["model"] == row["model"]]
        result = {key: row[key] for key in MODEL_FACTS} | {"unit": "nats"}
        result["verdict"] = asdict(findings(sparse_verdict, row["model"]))
        result["rerun"] = again[again["model"] == row["model"]].drop(columns="model").to_dict("records")
        own_quarters = quarters[quarters["model"] == row["model"]].drop(columns="model")
        result["quarters"] = own_quarters.to_dict("records")
        result["lengths"] = findings(smallest_enough, row["model"]).to_dict("records")
        result["conditions"] = (
            conditions[conditions["model"] == row["model"]].drop(columns="model").to_dict("records")
        )
        result["sweep"] = own.drop(columns="model").to_dict("records")
        if row["model"] in drawn(findings):
            estimates = measurements.sweep_estimates
            own = estimates[estimates["model"] == row["model"]].drop(columns="model")
            result["sampled"] = {**drawing(findings, row["model"]), "estimates": own.to_dict("records")}
        results.append(result)
    return json_object("k-sweep", findings, scope=SCOPE, results=results)


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
            f"Weight kept is the mean over {counted(verdict.queries, 'query')} with more than "
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
        each = ", ".join(f"{needed_words(row)} at {counted(row['length'], 'token')}" for row in records(rows))
        lines.append(
            f"Smallest k of {mask} from which on {unit.what} changes by at most {limit} on average: {each}."
        )
    return lines


def needed_words(row: Mapping[str, Any]) -> str:
    """Return the k that a length needs, and its share of the keys."""
    return f"above {row['largest']}" if pd.isna(row["k"]) else f"{row['k']} ({whole_percent(row['kept'])})"


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
        sentences.append(f"{name} keeps {whole_percent(budget['share'])} of the keys and {unit.cost(row)}{within}")
    if not sentences:
        return []
    return [
        f"Budgets, chosen on samples 0 to {first - 1} and run on {first} to {last}, which had no part in the "
        f"choice: {'; '.join(sentences)}."
    ]


_EVERY_UP_TO, _STEP = 8, 4  # every k up to 8, then every fourth; the CSV has all
_NO_STREAM = (
    "Δ stream is left out: through which matrix a head writes into the stream is known for certain of models that "
    "semdiag trained, run unchanged with the keys that they keep."
)


def print_k_sweep(findings: Findings, every: bool = False) -> None:
    """Print the verdict of each model and what masks changed, then its grounds; ``every``: and a table by k."""
    screen = wide_console()
    summary = findings(k_sweep_summary)
    for result in summary["results"]:
        first, *more = verdict_lines(findings, result["model"])
        screen.print(f"\n{title(result)}: within this model, by k")
        say_sentences([first])
        if result["rerun"]:
            screen.print(_rerun_table(result["rerun"]))
            say_sentences(_unknown(result["rerun"]))
        say_sentences(more)
        if result["sweep"]:
            table, without, rows = _table(result)
            if not every:
                say_sentences([f"Weight, δ(k), Δ(k), load and ξ of {rows} k were measured: --all shows them."])
                continue
            screen.print(table)
            if without:
                say_sentences([f"Δ head was not computed at k = {without}."])
            if "stream_change" not in {row["quantity"] for row in result["sweep"]}:
                say_sentences([_NO_STREAM])
    say_sentences([summary["scope"]])


def _change(value: Value) -> str:
    """Return a change, 0 where it is as small as rounding."""
    known = number_from_json(value)
    return number(0.0 if abs(known) < ROUNDING else known)


def _growth(change: Value) -> str:
    value = number_from_json(change)
    return number(math.inf if value > 700 else math.exp(value))


def _harmed(share: Value, high: Value) -> str:
    """Return the share of samples that change much, and the one-sided limit of that of inputs."""
    return "–" if math.isnan(number_from_json(share)) else f"{percent(share)} (≤ {percent(high)})"


def _interval(row: Summary) -> str:
    """Return the interval of a change, or in a few words why there is none."""
    low, high = number_from_json(row["low"]), number_from_json(row["high"])
    if math.isfinite(low) and math.isfinite(high):
        low, high = (0.0 if abs(end) < ROUNDING else end for end in (low, high))
        return interval(low, high, between=" to ")
    if row["seen"] == 0:
        return "none seen"
    return "all alike" if row["units"] >= FEWEST and row["least"] == row["worst"] else "none"


_RERUN = (
    Column("name", "mask", text), Column("kept", "keys", percent), Column("mass", "weight", percent, drop=4),
    Column("head_change", "Δ head", drop=2), Column("stream_change", "Δ stream", drop=1),
    Column("change", "Δ {}", _change, drop=NEVER),
    Column("", "95% interval", _interval, drop=NEVER),
    Column("harmed harmed_high", "harmed", _harmed, drop=5), Column("random", form=_change, drop=3),
    Column("growth", "ppl ×", _growth, drop=20), Column("divergence", "KL", _change),
    Column("changed", form=percent, drop=20), Column("accuracy", form=percent, drop=6),
)  # fmt: skip


def _rerun_table(rows: list[Summary]) -> NumberTable:
    """Return a row a mask: what it changed."""
    measure = rows[0]["measure"].replace("_", " ")
    several = bool({row["mask"] for row in rows if row["mask"] in KINDS} - {TOP_K, RANDOM})
    control = {} if several else {row["k"]: row["change"] for row in rows if row["mask"] == RANDOM}
    shown = [row for row in rows if row["mask"] not in ("none", "" if several else RANDOM)]
    added = (
        {
            "name": _name(row, several),
            "random": control.get(row["k"]),
            "growth": row["change"] if measure == "loss" else None,
        }
        for row in shown
    )
    return NumberTable(_RERUN, [row | extra for row, extra in zip(shown, added, strict=True)], unit=measure)


def _unknown(rows: list[Summary]) -> Iterator[str]:
    """Say why some rows have no weight."""
    top = [row for row in rows if row["mask"] == TOP_K and row["mass"] is None]
    above = [row["k"] for row in top if row["kept"] < 1]
    kept = [row["k"] for row in top if row["kept"] == 1]
    if above:
        yield f"Weight and Δ head of k = {', '.join(map(str, above))} are unknown: the sweep ends below (--max-k)."
    if kept:
        yield f"No query has more keys than k = {', '.join(map(str, kept))}: nothing is dropped."
    masks = {row["mask"] for row in rows}
    if TOP_K in masks and masks - {"none", TOP_K, RANDOM}:
        yield "Weight and Δ head are those of topk alone."


def _name(row: Summary, several: bool) -> str:
    """Return the kind of mask and its k; for top-p the share of the weight."""
    if row["k"] < 0:
        return str(row["mask"])
    return f"{row['mask']} {row['k']}{'%' * (row['mask'] == 'topp')}" if several else f"k = {row['k']}"


_SWEEP = (
    Column("k"), Column("ratio.p50", "δ(k)/δ_s p50"), Column("ratio.p95", "p95"),
    Column("separation.p50", "Δ(k) p50"), Column("separation.p5", "p5"), Column("mass.mean", "weight mean"),
    Column("mass.p5", "p5"), Column("mass_without_first.mean", "no first", drop=7),
    Column("head_change.mean", "Δ head"), Column("stream_change.mean", "Δ stream"),
    Column("load.p95", "load p95", drop=6), Column("load.p100", "p100", drop=4),
    Column("ln_sound.p50", "ln ξ p50", drop=5), Column("ln_paper.p50", "paper p50", drop=3),
    Column("W", "W met", plain, drop=1), Column("X", "X met", plain, drop=2),
)  # fmt: skip


def _table(result: Summary) -> tuple[NumberTable, str, int]:
    """Return a row a k, what it would keep; for which of these Δ head is unknown; and how many k were measured."""
    rows: dict[int, Summary] = {}
    for one in result["sweep"]:
        if one["layer"] == ALL:
            rows.setdefault(one["k"], {"k": one["k"]})[one["quantity"]] = one
    rows = {k: rows[k] for k in sorted(rows) if "mass" in rows[k]}
    always = {result["verdict"]["k"], result["k"], max(rows)}
    shown = [row for k, row in rows.items() if k <= _EVERY_UP_TO or k % _STEP == 0 or k in always]
    for row in shown:
        for name in "WX":
            row[name] = _met(result["conditions"], row["k"], name)
    names = {column.name.partition(".")[0] for column in _SWEEP}
    some = any("head_change" in row for row in shown)
    without = [str(row["k"]) for row in shown if some and "head_change" not in row]
    return NumberTable(_SWEEP, [dict.fromkeys(names) | row for row in shown]), ", ".join(without), len(rows)


def _met(conditions: list[Summary], k: int, name: str) -> str | None:
    met = [row["met"] for row in conditions if (row["k"], row["parameter"]) == (k, name)
           and row["percentile"] in JUDGED_PERCENTILES]  # fmt: skip
    return f"{sum(met)} of {len(met)}" if met else None
