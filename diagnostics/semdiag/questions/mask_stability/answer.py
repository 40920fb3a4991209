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
from semdiag.measuring.table import ALL
from semdiag.measuring.words import counted, interval, number_from_json, percent, percent_span, plain
from semdiag.presenting.answer import Answer, Folded, Glance, Outcome, heading, title, with_facts
from semdiag.presenting.drawing.style import drawing
from semdiag.presenting.tables import Column, NumberTable, not_shown
from semdiag.questions.mask_precision.answer import (
    certified_words,
    draw_survival,
    mask_words,
    precision_of,
    precision_rows,
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
        return Glance(Outcome.OPEN, "0 models", "have a mask that depends on the input")
    levels = sorted(table["level"].unique())
    level = float(levels[len(levels) // 2])
    rows = table[table["level"] == level]
    kinds = findings.measurements.models.set_index("model")["attention"]
    without = rows["model"].map(kinds).isin(DENSE)
    with_mask, supposed = rows[~without], rows[without]
    noise = f"stay the same under noise of {percent(level, 'g')}"
    chosen = f"that top-{findings.measurements.provenance['mask_noise']['k']} would choose"
    certified, changed = int(rows["certified_rows"].sum()), int(rows["certified_changed"].sum())
    tail = f"{changed:,} of {certified:,} certified ones changed"
    if with_mask.empty:
        words = f"of the masks {chosen} in {counted(len(supposed), 'model')} {noise}; {tail}"
        return Glance(Outcome.MEASURED, percent_span(supposed["exact"]), words)
    if len(supposed):
        share, models = percent_span(supposed["exact"]), counted(len(supposed), "model")
        tail = f"{share} of those {chosen} in {models} without a mask; {tail}"
    words = f"of the masks of {counted(len(with_mask), 'model')} {noise}; {tail}"
    return Glance(Outcome.MEASURED, percent_span(with_mask["exact"]), words)


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


def _heads(level: Summary, every: bool) -> list[Summary]:
    heads: list[Summary] = level["layers"]
    if every or len(heads) <= _MOST_HEADS:
        return heads
    least_stable = sorted(heads, key=lambda row: number_from_json(row["exact"]))[:_LEAST_STABLE]
    return [row for row in heads if any(row is one for one in least_stable)]


def _output(level: Summary) -> str:
    output = level["output"]
    moved = number_from_json(output["logit_change"])
    change = f"logits move by {percent(moved, '.2f')} of their norm"
    change = change if math.isfinite(moved) else "some logits are not numbers"
    words = f"Noise {level['noise']:g}: {change}, {percent(output['flipped'], '.2f')} of the predictions change"
    if output["accuracy_after"] is not None:
        words += f", accuracy {percent(output['accuracy_before'])} → {percent(output['accuracy_after'])}"
    return words + "."


def _shown(name: str, result: Summary) -> Iterator[str | NumberTable | Folded]:
    yield f"{name}: {result['mask']}"
    yield from (f"{refused}." for refused in result["refused"] if refused != result["mask"])
    yield from precision_rows(result["precision"]) if result["precision"] else ()
    levels = result["levels"]
    if not levels:
        return
    short, whole = (
        [{"noise": one["noise"], **row} for one in levels for row in [*_heads(one, every), one["all"]]]
        for every in (False, True)
    )
    left_out = len(whole) - len(short)
    note = [f"Shown are the {_LEAST_STABLE} heads whose masks change most. {not_shown(left_out)}"] * bool(left_out)
    yield Folded([NumberTable(_SHOWN_COLUMNS, short), *note], [NumberTable(_SHOWN_COLUMNS, whole)])
    yield certified_words(result)
    yield from (_output(level) for level in levels if level["output"])  # unknown of an external model


def answer(findings: Findings) -> Answer:
    """Return agreement, certificate and prediction by noise level, head and pooled; and by number format."""
    table, effects, results = findings(mask_table), findings(_effect_table), {}
    shown: list[str | NumberTable | Folded] = []
    for model in findings.measurements.models["model"]:
        of_model, precision = table[table["model"] == model], precision_of(findings, model)
        pooled = of_model[of_model["layer"] == ALL]
        levels = []
        for level, rows in of_model.groupby("level"):
            entries = all_by_name(rows).drop(columns=["model", "level"]).to_dict("records")
            after = records(effects[(effects["model"] == model) & (effects["level"] == level)])
            output = without(after[0], "model", "level") if after else {}
            levels.append({"noise": level, "layers": entries[:-1], "all": entries[-1], "output": output})
        results[model] = json_ready(
            {
                "mask": mask_words(findings, model), "applicable": bool(precision) or not of_model.empty,
                "refused": refusals(findings, model),
                "certified_changed": int(pooled["certified_changed"].sum()),
                "certified_rows": int(pooled["certified_rows"].sum()), "levels": levels, "precision": precision,
            }
        )  # fmt: skip
        shown += _shown(title(findings, model), results[model])
    tables = {"mask_stability": with_facts(findings, all_by_name(table))}
    tables |= {"noise_effects": with_facts(findings, effects)} if len(effects) else {}
    glance = masks_glance(findings)
    parts = [each for one in shown for each in (one.short if isinstance(one, Folded) else [one])]
    folded = [each.strip() if isinstance(each, str) else each for each in parts]
    return Answer(
        glance, [glance.sentence] * (not table.empty),
        [f"{_mask_facts(findings)}.", *folded] if len(table) else folded, tables=tables, results=results,
        shown=shown,
    )  # fmt: skip


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
