"""Masks under noise: by noise level, layer and head, in words, on the terminal, and drawn."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from semdiag.capturing.attention_call import DENSE
from semdiag.measuring.findings.estimates import all_by_name, without
from semdiag.measuring.findings.findings import Findings, Summary, json_ready, records
from semdiag.measuring.findings.resampling import mean_interval, rank_correlation_interval
from semdiag.measuring.table import ALL, rows_of_model
from semdiag.measuring.words import counted, interval, number_from_json, percent, percent_span, plain
from semdiag.presenting.answer import (
    Answer,
    Claim,
    Collapsible,
    Glance,
    Outcome,
    Shown,
    heading,
    numbered_claims,
    title,
    with_facts,
)
from semdiag.presenting.drawing.style import drawing
from semdiag.presenting.tables import Column, NumberTable, not_shown
from semdiag.questions.mask_precision.answer import (
    certified_words,
    draw_survival,
    mask_words,
    precision_of,
    precision_parts,
    refusals,
)
from semdiag.questions.mask_stability.measure import MASKS, NOISE_EFFECTS

RESAMPLES = 200
_MEANS = ("agreement", "exact", "certified", "predicted", "response")


def mask_table(findings: Findings) -> pd.DataFrame:
    """Return the stability of masks by model, noise level, layer and head, and pooled."""
    rows = []
    for (model, level), of_level in findings.measurements[MASKS].groupby(["model", "level"], sort=False):
        for layer, head, part in _places(of_level):
            rows.append({"model": model, "level": level, "layer": layer, "head": head, **_described(part)})
    columns = ["model", "level", "layer", "head", "certified_rows", "certified_changed"]
    return pd.DataFrame(rows, columns=None if rows else columns)


def heads_pooled(findings: Findings) -> pd.DataFrame:
    """Return the stability of the masks of each layer, its heads together."""
    rows = []
    for (model, level, layer), part in findings.measurements[MASKS].groupby(["model", "level", "layer"]):
        share = mean_interval(part, "exact").if_varied().columns("exact")
        certified = float(part["certified"].astype(np.float64).mean())
        rows.append({"model": model, "level": level, "layer": layer, **share, "certified": certified})
    columns = ["model", "level", "layer", "exact", "exact_low", "exact_high", "certified"]
    return pd.DataFrame(rows, columns=columns)


def _effect_table(findings: Findings) -> pd.DataFrame:
    rows = []
    for (model, level), effects in findings.measurements[NOISE_EFFECTS].groupby(["model", "level"], sort=False):
        after = mean_interval(effects, "correct_after").if_varied()
        rows.append(
            {
                "model": model, "level": level, "samples": len(effects),
                "logit_change": effects["logit_change"].mean(skipna=False),
                "flipped": effects["flipped"].mean(), "accuracy_before": effects["correct_before"].mean(),
                **after.columns("accuracy_after"),
            }
        )  # fmt: skip
    return pd.DataFrame(rows, columns=["model", "level"] if not rows else None)


def _places(queries: pd.DataFrame) -> Iterator[tuple[int, int, pd.DataFrame]]:
    for layer, rows in queries.groupby("layer", sort=True):
        for head, part in rows.groupby("head", sort=True):
            yield int(str(layer)), int(str(head)), part
    yield ALL, ALL, queries


def _described(part: pd.DataFrame) -> Summary:
    means: dict[str, Any] = {}
    for name in _MEANS:
        means |= mean_interval(part, name, share=name != "response").if_varied().columns(name)
    disagreement = part.assign(disagreement=1 - part["agreement"].astype(np.float64))
    spearman = rank_correlation_interval(disagreement, "separation", "disagreement", RESAMPLES)
    means |= spearman.columns("spearman")
    swing = part["swing_sd"].astype(np.float64)
    return {
        "queries": len(part),
        "draws": int(part["draws"].iloc[0]),
        "separation_p50": float(part["separation"].median()),
        **means,
        "swing_sd": float(np.sqrt((swing**2).mean())),
        "certified_rows": round(float((part["certified"].astype(np.float64) * part["draws"]).sum())),
        "certified_changed": int(part["certified_changed"].sum()),
    }


def masks_glance(findings: Findings) -> Glance:
    """Return the share of masks, own and supposed, that stay the same under the middle noise level."""
    table = findings(mask_table)
    table = table[table["layer"] == ALL]
    if table.empty:
        words = "have a mask that depends on the input"
        return Glance(Outcome.OPEN, "0 models", words, claim_id="unchanged")
    levels = sorted(table["level"].unique())
    level = float(levels[len(levels) // 2])
    rows = table[table["level"] == level]
    kinds = findings.measurements.models.set_index("model")["attention"]
    dense = rows["model"].map(kinds).isin(DENSE)
    masked = rows[~dense]
    supposed = rows[dense]
    noise = f"stay the same under noise of {percent(level, 'g')}"
    choice = f"that top-{findings.measurements.provenance['mask_noise']['k']} would choose"
    certified = (
        f"{int(rows['certified_changed'].sum()):,} of {int(rows['certified_rows'].sum()):,} certified ones changed"
    )
    if masked.empty:
        words = f"of the masks {choice} in {counted(len(supposed), 'model')} {noise}; {certified}"
        return Glance(Outcome.MEASURED, percent_span(supposed["exact"]), words, claim_id="unchanged")
    words = f"of the masks of {counted(len(masked), 'model')} {noise}"
    if len(supposed):
        models = counted(len(supposed), "model")
        words += f"; {percent_span(supposed['exact'])} of those {choice} in {models} without a mask"
    return Glance(Outcome.MEASURED, percent_span(masked["exact"]), f"{words}; {certified}", claim_id="unchanged")


def _mask_facts(findings: Findings) -> str:
    samples = int(findings.measurements[MASKS].groupby("model")["sample"].nunique().max())
    plan = findings.measurements.provenance.get("mask_noise") or {}
    seed = "" if plan.get("seed") is None else f" (seed {plan['seed']})"
    noise = "Noise on the embedded tokens, relative to each token's RMS"
    draws = int(findings.measurements[MASKS]["draws"].iloc[0])
    return f"{noise}; {counted(samples, 'sample')} per model, {draws} draws{seed}"


_SHOWN_COLUMNS = (
    Column("noise"), Column("layer", form=plain),
    Column("head", form=lambda head: "" if head == "all" else str(head)),
    Column("separation_p50", "Δ p50", drop=4), Column("certified", form=percent),
    Column("predicted", form=percent), Column("exact", "observed", percent),
    Column("exact_low exact_high", "observed 95%", partial(interval, factor=100), drop=3),
    Column("agreement", form=percent),
    Column("response"), Column("spearman", "Spearman Δ", drop=2),
    Column("spearman_low spearman_high", "Spearman 95%", interval, drop=1),
)  # fmt: skip
_MOST_HEADS = 24  # of more, only the least stable are shown
_LEAST_STABLE = 5


def _least_stable(level: Summary) -> list[Summary]:
    """Return the heads of a noise level, of many only those whose masks change most."""
    heads: list[Summary] = level["layers"]
    if len(heads) <= _MOST_HEADS:
        return heads
    least_stable = sorted(heads, key=lambda row: number_from_json(row["exact"]))[:_LEAST_STABLE]
    return [row for row in heads if any(row is one for one in least_stable)]


def _output_claim(level: Summary, model: str) -> Claim:
    """Return what a noise level does to the model's outputs."""
    output = level["output"]
    logit_change = number_from_json(output["logit_change"])
    change = "some logits are not numbers"
    if math.isfinite(logit_change):
        change = f"logits move by {percent(logit_change, '.2f')} of their norm"
    words = f"Noise {level['noise']:g}: {change}, {percent(output['flipped'], '.2f')} of the predictions change"
    if output["accuracy_after"] is not None:
        words += f", accuracy {percent(output['accuracy_before'])} → {percent(output['accuracy_after'])}"
    return Claim(f"output-{level['noise']:g}", f"{words}.", model, logit_change, "share of the norm")


def _parts(findings: Findings, model: str, result: Summary) -> list[Claim | NumberTable | Collapsible]:
    """Return which mask of a model was judged, and how it changes, as claims and tables."""
    parts: list[Claim | NumberTable | Collapsible] = [
        Claim("mask", f"{title(findings, model).strip()}: {result['mask']}", model)
    ]
    refused = [f"{reason}." for reason in result["refused"] if reason != result["mask"]]
    parts += numbered_claims("refused", refused, model)
    if result["precision"]:
        parts += precision_parts(result["precision"], model)
    levels = result["levels"]
    if not levels:
        return parts
    collapsed = [{"noise": one["noise"], **row} for one in levels for row in [*_least_stable(one), one["all"]]]
    expanded = [{"noise": one["noise"], **row} for one in levels for row in [*one["layers"], one["all"]]]
    short: list[Claim | NumberTable] = [NumberTable(_SHOWN_COLUMNS, collapsed)]
    if hidden := len(expanded) - len(collapsed):
        note = f"Shown are the {_LEAST_STABLE} heads whose masks change most. {not_shown(hidden)}"
        short.append(Claim("least-stable", note, model))
    parts.append(Collapsible(short, [NumberTable(_SHOWN_COLUMNS, expanded)]))
    parts.append(Claim("certified", certified_words(result), model, result["certified_changed"], "rows"))
    parts += [_output_claim(level, model) for level in levels if level["output"]]  # unknown of an external model
    return parts


def answer(findings: Findings) -> Answer:
    """Return agreement, certificate and prediction by noise level, head and pooled; and by number format."""
    table = findings(mask_table)
    effects = findings(_effect_table)
    results: dict[str, Summary] = {}
    shown: list[Shown] = []
    details: list[Claim | NumberTable] = []
    if len(table):
        details.append(Claim("noise", f"{_mask_facts(findings)}."))
    for model in findings.measurements.models["model"]:
        results[model] = _result(findings, model, rows_of_model(table, model), rows_of_model(effects, model))
        parts = _parts(findings, model, results[model])
        shown += ["", *parts]
        for part in parts:
            collapsed = part.collapsed if isinstance(part, Collapsible) else [part]
            details += [each for each in collapsed if not isinstance(each, str)]
    tables = {"mask_stability": with_facts(findings, all_by_name(table))}
    if len(effects):
        tables["noise_effects"] = with_facts(findings, effects)
    glance = masks_glance(findings)
    headline = [] if table.empty else [glance.claim]
    return Answer(glance, headline, details, tables=tables, results=results, shown=shown)


def _result(findings: Findings, model: str, table: pd.DataFrame, effects: pd.DataFrame) -> Summary:
    """Return what JSON says of a model, from its rows of the tables."""
    precision = precision_of(findings, model)
    pooled = table[table["layer"] == ALL]
    levels = []
    for level, rows in table.groupby("level"):
        entries = all_by_name(rows).drop(columns=["model", "level"]).to_dict("records")
        after = records(effects[effects["level"] == level])
        output = without(after[0], "model", "level") if after else {}
        levels.append({"noise": level, "layers": entries[:-1], "all": entries[-1], "output": output})
    result = {
        "mask": mask_words(findings, model),
        "applicable": bool(precision) or not table.empty,
        "refused": refusals(findings, model),
        "certified_changed": int(pooled["certified_changed"].sum()),
        "certified_rows": int(pooled["certified_rows"].sum()),
        "levels": levels,
        "precision": precision,
    }
    json_values: Summary = json_ready(result)
    return json_values


@drawing(
    "Share of queries whose mask stays exactly the same under input noise, per layer, with 95% "
    "intervals and the certified share dotted: {shown}.",
    "A curve near 1 belongs to noise that hardly changes the masks of a layer. The dotted line is what can be "
    "proven from Δ and the change of the scores alone; masks between it and the curves survive without a proof.",
)
def masks_unchanged(findings: Findings) -> Figure:
    """Draw the share of unchanged masks, a curve for each noise level against layers."""
    table = findings(heads_pooled)
    names = {"exact": "same", "exact_low": "low", "exact_high": "high"}
    table = table.assign(curve=[f"noise {percent(level, 'g')}" for level in table["level"]])
    note = f"Bands: 95% intervals from resampled sequences. {_mask_facts(findings)}" if len(table) else ""
    return draw_survival(findings, MASKS, table.rename(columns=names), note)


HEADINGS = heading(
    "mask-stability", "Do masks survive noise?", (masks_unchanged,),
    "A full-attention model drops no key: the mask judged is the one that top-k would choose from its scores, on "
    "which its output does not depend.",
    "Certified: the scores provably move too little to change the mask. A certified mask that changed would be an "
    "error of semdiag.",
    "The noise is Gaussian, unlike that of data or of an adversary. Intervals are about other inputs of the same "
    "kind.",
)  # fmt: skip
